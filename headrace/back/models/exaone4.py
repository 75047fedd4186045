"""EXAONE 4: norms after both branches and over each query and key head; with windows, global layers
have no position embedding."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import POST
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Exaone4ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    layers = tuple(
        LayerSpec(mixer=attention, placement=POST)
        for attention in exaone_attentions(scope, config, sizes)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def exaone_attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> tuple[AttentionSpec, ...]:
    """The attention of each layer."""
    window = config.int("sliding_window", None, ge=1)
    period = _period(config)
    windows = read_windows(
        config, sizes.layers, window=window, sliding=lambda layer: (layer + 1) % period != 0
    )
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    return tuple(
        AttentionSpec(
            **plain_attention(sizes),
            rope=rope if of_layer or not window else None,
            window=of_layer,
            qk_norm=QKNorm(eps=sizes.eps),
        )
        for of_layer in windows
    )


def _period(config: ConfigReader) -> int:
    """Every how manieth layer is global: a number, or a pattern such as LLLG."""
    key = "sliding_window_pattern"
    if not isinstance(config.raw.get(key), str):
        return config.int(key, 4, ge=0)
    pattern = config.str(key, "")
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise config.wrong(key, "a number, or local layers and one global (LLLG)")
    return len(pattern)
