"""InternLM 1: Llama's decoder, whose projections of attention have biases where `bias` says so."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternLMForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("bias", True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
