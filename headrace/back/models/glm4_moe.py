"""GLM-4.5 to 4.7: attention with rotated first halves of the heads, dense layers first, then
experts routed as DeepSeek-V3 routes them."""

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
from headrace.back.models.moe import draft_layers, sigmoid_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Glm4MoeForCausalLM, SolarOpenForCausalLM. Only query, key and value have the bias."""
    sizes = read_sizes(config, eps=1e-5)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=config.bool("attention_bias", False),
        qk_norm=QKNorm(eps=sizes.eps) if config.bool("use_qk_norm", False) else None,
    )
    is_solar = config.str("model_type", "glm4_moe") == "solar_open"  # has experts in all layers
    first = 0 if is_solar else config.int("first_k_dense_replace", 1, ge=0)
    mixture = sigmoid_mixture(config)
    layers = tuple(
        LayerSpec(attention=attention, feed_forward=mixture if i >= first else GATED_MLP)
        for i in range(sizes.layers)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))
