"""Qwen 3, dense: Llama's decoder with a norm over each query and key head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.qwen2 import qwen_windows
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3ForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                **plain_attention(sizes),
                rope=rope,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
            )
        )
        for window in qwen_windows(config, sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
