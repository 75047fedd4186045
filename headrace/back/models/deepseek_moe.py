"""DeepSeek-MoE, the first (Dai et al. 2024): Llama's attention, dense layers first, then experts
routed by softmax beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.moe import dense_first, feed_forwards, routed_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekForCausalLM."""
    sizes = read_sizes(config)
    config.choice("scoring_func", ("softmax",), "softmax")
    mixture = routed_mixture(config, grouped=False)
    renormalize = config.bool("norm_topk_prob", False)
    mixture = replace(mixture, router=replace(mixture.router, renormalize=renormalize))
    bias = config.bool("attention_bias", False)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=bias,
        out_bias=bias,
    )
    every = config.int("moe_layer_freq", 1, ge=1)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(mixture, dense_first(config, sizes.layers, every=every))
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
