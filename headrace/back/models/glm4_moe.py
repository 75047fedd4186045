"""GLM-4.5 to 4.7: attention with rotated first halves of the heads, dense layers first, then
experts routed as DeepSeek-V3 routes them."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import dense_first, draft_layers, feed_forwards, sigmoid_mixture
from headrace.base.config.hf import ConfigReader

EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Glm4MoeForCausalLM."""
    sizes = read_sizes(config, eps=EPS)
    return glm_moe_decoder(scope, config, sizes, dense_first(config, sizes.layers, default=1))


def glm_moe_decoder(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, sparse: Iterable[bool]
) -> Decoder:
    """The decoder with experts where `sparse`. Only query, key and value have the bias."""
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=config.bool("attention_bias", False),
        qk_norm=QKNorm(eps=sizes.eps) if config.bool("use_qk_norm", False) else None,
    )
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(sigmoid_mixture(config), sparse)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))
