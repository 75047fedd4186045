"""What a config.json may not ask for: code of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import CheckpointError


def remote_code(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted keys of `raw`, nested ones too, that name code outside the checkpoint's data
    (auto_map)."""
    names: list[str] = []
    stack: list[tuple[str, Any]] = [("", raw)]
    while stack:
        prefix, value = stack.pop()
        if isinstance(value, Mapping):
            names += [f"{prefix}{key}" for key in value if key == "auto_map"]
            stack += [(f"{prefix}{key}.", child) for key, child in value.items()]
        elif isinstance(value, list):
            stack += [(f"{prefix}{index}.", child) for index, child in enumerate(value)]
    return tuple(sorted(names))


def refuse_remote_code(raw: Mapping[str, Any], where: str) -> None:
    """Refuses a checkpoint that no family here knows if it points to code of its own; that code is
    never run."""
    keys = remote_code(raw)
    if keys:
        raise CheckpointError(
            f"{where}: this model needs code of its own ({', '.join(keys)}), and code from checkpoints is never run; "
            "use a model whose architecture is supported",
            field=keys[0],
        )
