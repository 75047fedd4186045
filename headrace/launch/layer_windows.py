"""How many tokens each layer of a model keeps, read off its config."""

from __future__ import annotations

from headrace.back.models.cached_layers import layers_without_cache
from headrace.base.config.hf import ConfigReader

SLIDES = "sliding_attention"


def layer_windows(reader: ConfigReader, family: str, layers: int) -> tuple[int | None, ...]:
    """See ModelFacts.windows; 0: the layer keeps nothing per token. `attention_window_size` is that
    of all layers that attend (RecurrentGemma), `sliding_window` of those that `layer_types`
    lists."""
    without = layers_without_cache(family, reader.raw, layers)
    everywhere = reader.int("attention_window_size", None, ge=1)
    window = reader.int("sliding_window", None, ge=1)
    kinds = reader.list("layer_types", None, of=str)
    listed = window is not None and kinds is not None and len(kinds) == layers

    def kept(layer: int) -> int | None:
        if layer in without:
            return 0
        slides = listed and kinds is not None and kinds[layer] == SLIDES
        return window if slides else everywhere

    return tuple(kept(layer) for layer in range(layers))
