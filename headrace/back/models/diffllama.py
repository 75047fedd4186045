"""DiffLlama: Llama's decoder with differential attention."""

from __future__ import annotations

import math

from headrace.back.layers.differential_attention import DifferentialAttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DiffLlamaForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    if sizes.kv_heads % 2:
        raise config.wrong("num_key_value_heads", "an even number: heads are taken in two halves")
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layers = tuple(
        LayerSpec(
            mixer=DifferentialAttentionSpec(
                width=sizes.width,
                heads=sizes.heads,
                kv_heads=sizes.kv_heads,
                head_dim=sizes.head_dim,
                rope=rope,
                first=0.8 - 0.6 * math.exp(-0.3 * layer),
                eps=sizes.eps,
                bias=config.bool("attention_bias", False),
            )
        )
        for layer in range(sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
