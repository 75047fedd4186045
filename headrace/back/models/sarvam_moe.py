"""Sarvam with experts: Qwen 3's attention in one merged tensor, a dense layer first, then experts
routed as DeepSeek-V3 routes them."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import dense_first, feed_forwards, sigmoid_mixture
from headrace.base.config.hf import ConfigReader

NAMES = AttentionNames(module="attention", merged="query_key_value", out="dense")
NORMS = ("query_layernorm", "key_layernorm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SarvamMoEForCausalLM."""
    sizes = read_sizes(config)
    is_normed = config.bool("use_qk_norm", True)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=config.bool("use_qkv_bias", False),
        out_bias=config.bool("use_bias", False),
        qk_norm=QKNorm(eps=sizes.eps, names=NORMS) if is_normed else None,
        names=NAMES,
    )
    mixture = sigmoid_mixture(config, bias_name="gate.expert_bias")
    sparse = dense_first(config, sizes.layers, default=1)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(mixture, sparse)
    )
    names = DecoderNames(embedding="word_embeddings")
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=names))
