"""CWM (code world model, Meta 2025): Llama's decoder with windows in three of four layers."""

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
    """CwmForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=1e6
    )
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", None, ge=1),
        sliding=lambda layer: layer % 4 != 0,
    )
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**plain_attention(sizes), rope=rope, window=window))
        for window in windows
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
