"""Apertus: Llama's decoder with xIELU instead of a gate and a norm over each query and key head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="attention_layernorm", before_mlp="feedforward_layernorm"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ApertusForCausalLM."""
    sizes = read_sizes(config, gated=False, default_activation="xielu", eps=1e-5)
    bias = config.bool("attention_bias", False)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=12_000_000.0,
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(eps=sizes.eps),
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
