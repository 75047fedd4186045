"""Qwen 3 with experts: Qwen 3's attention, softmax routing without shared experts."""

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
from headrace.back.models.moe import sparse_layers
from headrace.back.models.qwen2 import qwen_windows
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3MoeForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    mixture = qwen_mixture(config)
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
            feed_forward=mixture if sparse else GATED_MLP,
        )
        for window, sparse in zip(
            qwen_windows(config, sizes.layers), sparse_layers(config, sizes.layers), strict=True
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
