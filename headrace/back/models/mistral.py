"""Mistral: Llama's decoder with one sliding window in all layers, or none."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MistralForCausalLM. An absent sliding_window is full attention, as in the checkpoints since
    v0.2."""
    sizes = read_sizes(config)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=config.int("sliding_window", None, ge=1),
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
