"""ERNIE 4.5, dense: Llama's decoder, neighbouring dimensions rotated in pairs."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ernie4_5ForCausalLM."""
    return ernie_decoder(scope, config, layout="pairs")


def ernie_decoder(scope: Scope, config: ConfigReader, *, layout: str) -> Decoder:
    """The decoder; `layout`: of rotated dimensions."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    bias = config.bool("use_bias", False)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=500_000.0,
        layout=layout,
    )
    layer = LayerSpec(
        mixer=AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias),
        feed_forward=GatedMLPSpec(bias=bias),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
