"""How many layers a config.json describes: it states the number, or what each layer is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.config.hf import REQUIRED, ConfigReader

PER_LAYER = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Keys with one entry (or letter) per layer."""
LISTED = (
    "num_key_value_heads_per_layer",
    "block_configs",
    "num_query_heads",
    "num_kv_heads",
    "ffn_multipliers",
)
"""The same, of models whose layers differ in size; where it is no list, it is that of all."""
INDICES = ("attn_layer_indices",)
"""Keys that list layers by their numbers."""


def num_layers(config: ConfigReader) -> int:
    """The number of layers, at least 1."""
    kinds = next((config.raw[key] for key in PER_LAYER if key in config), None)
    counted = len(kinds) if isinstance(kinds, list | str) and kinds else REQUIRED
    return config.int(
        "num_hidden_layers",
        counted,
        aliases=("n_layer", "num_layers", "n_layers"),
        ge=1,
        le=100_000,
    )


def first_layers(raw: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The config.json of a model's first `count` layers, or of all if there are fewer."""
    stated = raw.get("num_hidden_layers")
    count = min(count, stated) if isinstance(stated, int) else count
    cut = {**raw, "num_hidden_layers": count}
    for key in (*PER_LAYER, *LISTED):
        if isinstance(cut.get(key), list | str):
            cut[key] = cut[key][:count]
    for key in INDICES:
        if isinstance(cut.get(key), list):
            cut[key] = [index for index in cut[key] if index < count]
    return cut
