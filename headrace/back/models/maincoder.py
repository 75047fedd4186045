"""Maincoder (2025): Llama's decoder with the names of Llama 4's MLPs, rotations of neighbouring
dimensions, and a norm over each query and key head behind them (names and keys of the published
checkpoint)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MaincoderForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=1e6,
        layout="pairs",
    )
    normed = config.bool("use_qk_norm", True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qk_norm=QKNorm(eps=sizes.eps, after_rope=True) if normed else None,
        ),
        feed_forward=GatedMLPSpec(name="feed_forward"),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
