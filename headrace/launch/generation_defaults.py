"""The sampling defaults that a checkpoint sets in generation_config.json, checked at start: a value
no request could have would later be blamed on every client that relies on the defaults. And what
ends a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.config.hf import ConfigReader
from headrace.base.config.kimi_audio import end_of
from headrace.base.errors import CheckpointError
from headrace.base.wire.request import BOUNDS, Bound

_DEFAULT_BOUNDS = {
    name: BOUNDS[name]
    for name in ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
}
_TOP_K_BOUND = Bound(-1.0, float((1 << 31) - 1))


def generation_defaults(entries: dict[str, Any]) -> dict[str, float | int]:
    """The entries that are sampling defaults; the others mean nothing here. CheckpointError names
    an entry with a value that no request could have."""
    defaults = {}
    for name in (*_DEFAULT_BOUNDS, "top_k"):
        value = entries.get(name)
        if value is None:
            continue
        bound = _DEFAULT_BOUNDS.get(name, _TOP_K_BOUND)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not bound.holds(value) or (name == "top_k" and value != int(value)):
            kind = "a whole number from -1" if name == "top_k" else str(bound)
            raise CheckpointError(
                f"generation_config.json: {name} is {value!r:.80}; {kind} is allowed", field=name
            )
        defaults[name] = int(value) if name == "top_k" else value
    return {"temperature": 0.0} if entries.get("do_sample") is False else defaults


def eos_ids_of(
    generation: Mapping[str, Any], reader: ConfigReader, where: str, width: int
) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's if it has any, else config.json's; each below
    the logits width."""
    name = where.replace("config.json", "generation_config.json")
    stated = ConfigReader(generation, name).ids("eos_token_id", below=width)
    stated = stated or reader.ids("eos_token_id", below=width)
    own = _ENDS.get(str(reader.raw.get("model_type")))
    return stated if own is None else tuple(dict.fromkeys((own(reader.raw, where), *stated)))


_ENDS = {"kimi_audio": end_of}
"""By `model_type`: what ends an answer, where no file says so."""
