"""Command R7B and Command A: Command R's layers, three local ones (sliding window, rope) to one
global without position embedding."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.norm import LAYER_NO_BIAS, PARALLEL
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
    """Cohere2ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    pattern = config.int("sliding_window_pattern", 4, aliases=("_sliding_window_pattern",), ge=1)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 4096, ge=1),
        sliding=lambda layer: (layer + 1) % pattern != 0,
    )
    bias = config.bool("attention_bias", False)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layout="pairs"
    )
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if window else None,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
            ),
            placement=PARALLEL,
        )
        for window in windows
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=LAYER_NO_BIAS,
            logits_scale=config.float("logit_scale", 0.0625, ge=0.0),
        ),
    )
