"""Granite 3, dense: Llama's decoder with multipliers on embeddings, scores, branches and logits."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteForCausalLM."""
    sizes = read_sizes(config)
    mlp = GatedMLPSpec(bias=config.bool("mlp_bias", False))
    attention = granite_attention(scope, config, sizes)
    return granite_decoder(scope, config, sizes, [attention] * sizes.layers, mlp)


def granite_attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, *, rotated: bool = True
) -> AttentionSpec:
    """Attention whose scores have a factor of their own."""
    bias = config.bool("attention_bias", False)
    rope = None
    if rotated:
        rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    scale = config.float("attention_multiplier", 1.0)
    return AttentionSpec(
        **{**plain_attention(sizes), "scale": scale}, rope=rope, qkv_bias=bias, out_bias=bias
    )


def granite_decoder(
    scope: Scope,
    config: ConfigReader,
    sizes: DecoderSizes,
    mixers: Iterable[MixerSpec],
    feed_forward: FeedForwardSpec,
) -> Decoder:
    """Layers of these mixers, with the multipliers of all Granite models. logits_scaling
    divides."""
    branch_scale = config.float("residual_multiplier", 1.0)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward, branch_scale=branch_scale)
        for mixer in mixers
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            embedding_scale=config.float("embedding_multiplier", 1.0),
            logits_scale=1.0 / config.float("logits_scaling", 1.0, ge=1e-6),
        ),
    )
