"""Granite 3, dense: Llama's decoder with multipliers on embeddings, scores, branches and logits."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteForCausalLM. logits_scaling divides."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    scale = config.float("attention_multiplier", 1.0)
    layer = LayerSpec(
        attention=AttentionSpec(
            **{**plain_attention(sizes), "scale": scale},
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=GatedMLPSpec(bias=config.bool("mlp_bias", False)),
        branch_scale=config.float("residual_multiplier", 1.0),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("embedding_multiplier", 1.0),
            logits_scale=1.0 / config.float("logits_scaling", 1.0, ge=1e-6),
        ),
    )
