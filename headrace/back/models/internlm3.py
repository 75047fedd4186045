"""InternLM 3: Llama's decoder, whose biases have keys of their own."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternLM3ForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("bias", False, aliases=("mlp_bias",))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=config.bool("qkv_bias", False, aliases=("attention_bias",)),
            out_bias=bias,
        ),
        feed_forward=GatedMLPSpec(bias=bias),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
