"""dots.llm1: Qwen 3's attention, dense layers first, then experts routed as DeepSeek-V3 routes
them."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    GATED_MLP,
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import sigmoid_mixture
from headrace.back.models.qwen2 import qwen_windows
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Dots1ForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    first, mixture = config.int("first_k_dense_replace", 0, ge=0), sigmoid_mixture(config)
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                **plain_attention(sizes),
                rope=rope,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
            ),
            feed_forward=mixture if i >= first else GATED_MLP,
        )
        for i, window in enumerate(qwen_windows(config, sizes.layers))
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
