"""Seed-OSS: Llama's decoder with biases on query, key and value."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SeedOssForCausalLM."""
    sizes = read_sizes(config)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=config.bool("attention_bias", True),
            out_bias=config.bool("attention_out_bias", False),
        ),
        feed_forward=GatedMLPSpec(bias=config.bool("mlp_bias", False)),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
