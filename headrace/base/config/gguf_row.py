"""One row of the table of GGUF architectures (gguf_config.py, gguf_rows.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.base.config.gguf import GGUFFile

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How one value of `general.architecture` is read.

    `model_type` and `architecture` are config.json's; `fixed` holds keys the metadata leave unsaid;
    `keys` further metadata keys (without the architecture's prefix) by their config key; `adjust`
    does what a table cannot. `latent`: attention over latents.
    """

    model_type: str
    architecture: str
    fixed: Config = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    adjust: Callable[[GGUFFile, str, Config], None] | None = None
    latent: bool = False
