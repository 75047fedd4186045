"""OLMo 1: Llama's decoder with layer norms that have no weights; some checkpoints cut queries, keys
and values."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.norm import LAYER_NO_WEIGHT
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OlmoForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("attention_bias", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
            clip=config.float("clip_qkv", None, ge=0.0),
        )
    )
    return Decoder(
        scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER_NO_WEIGHT)
    )
