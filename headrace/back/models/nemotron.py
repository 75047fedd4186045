"""Nemotron 3 and 4 and Minitron: layer norms (weights stored minus 1), a squared ReLU without a
gate, half of each head rotated."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER_UNIT_OFFSET
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """NemotronForCausalLM."""
    sizes = read_sizes(config, gated=False, default_activation="relu2", eps=1e-5)
    bias = config.bool("attention_bias", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_share=0.5,
            ),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=PlainMLPSpec(bias=config.bool("mlp_bias", False)),
    )
    return Decoder(
        scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER_UNIT_OFFSET)
    )
