"""Keys of published config.json files (published_keys.py) of families with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.back.models.key_names import Keys
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers


def _plamo2(config: ConfigReader) -> Keys:
    """Of each period of layers the middle one attends, of few layers the last; all but the listed
    ones of these have a window, which does not count the token itself."""
    layers, step = num_layers(config), config.int("mamba_step", 2, ge=2)
    full = config.list("full_attention_idx", (), of=int) or ()
    mixes = config.bool("mamba_enabled", True)
    middle = step // 2

    def attends(layer: int) -> bool:
        if layers <= middle:
            return layer == layers - 1
        return layer % step == middle

    window = config.int("attention_window_size", 2048, ge=1) + 1
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    return {
        "head_dim": config.int("hidden_size_per_head", 128, ge=2),
        "num_key_value_heads": config.int("num_key_value_heads", 4, ge=1),
        "layer_types": [
            kind if attends(i) or not mixes else "mamba" for i, kind in enumerate(kinds)
        ],
        "sliding_window": window,
        "attention_window_size": None,
    }


def _unbounded(config: ConfigReader) -> Keys:
    """A state has no longest text; what the config states is that of the training."""
    return {"max_position_embeddings": None}


RECURRENT_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    **dict.fromkeys(("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), _plamo2),
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), _unbounded),
}
"""By the name of the architecture."""
