"""BitNet b1.58 (Ma et al. 2025): squared ReLU gates, norms of what the heads give and of the inner
values of the MLP."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BitNetForCausalLM, and BitnetForCausalLM, whose keys stand under common names besides."""
    sizes = read_sizes(config, default_activation="relu2", eps=1e-5)
    bias = config.bool("attention_bias", False)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=5e5
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
            out_norm=("attn_sub_norm", sizes.eps),
        ),
        feed_forward=GatedMLPSpec(inner_norm=("ffn_sub_norm", sizes.eps)),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
