"""Ministral: Mistral's decoder, whose layers say one by one whether they have the sliding
window."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MinistralForCausalLM."""
    sizes = read_sizes(config)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", None, ge=1),
        sliding=lambda layer: True,
    )
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**plain_attention(sizes), rope=rope, window=window))
        for window in windows
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
