"""Gemma 1: Llama's decoder with norms stored minus 1 and embeddings scaled by sqrt(hidden_size)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GemmaForCausalLM. "gelu" in its first configs meant the tanh form."""
    sizes = gemma_sizes(config)
    if sizes.activation == "gelu" and "hidden_activation" not in config:
        sizes = replace(sizes, activation="gelu_tanh")
    if config.bool("use_bidirectional_attention", False):
        raise config.wrong("use_bidirectional_attention", "false for generation")
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layer = LayerSpec(
        mixer=AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=RMS_UNIT_OFFSET,
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
        ),
    )
