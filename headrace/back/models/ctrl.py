"""CTRL (Keskar et al. 2019): layer norms before each branch, sines and cosines as positions, a bias
of the tied head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="w", layers="h", norm="layernorm")
ATTENTION = AttentionNames(
    module="multi_head_attention", query="Wq", key="Wk", value="Wv", out="dense"
)
PLACEMENT = NormPlacement(before_attention="layernorm1", before_mlp="layernorm2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CTRLLMHeadModel."""
    sizes = read_sizes(
        config,
        kv_heads=config.int("num_attention_heads", aliases=HEADS, ge=1),
        default_activation="relu",
        gated=False,
        eps=1e-6,
        tied=True,
        inner=config.int("dff", ge=1),
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=None, qkv_bias=True, out_bias=True, names=ATTENTION
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(name="ffn", up="0", down="2", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            embedding_scale=sizes.width**0.5,
            positions=SinusoidalPositions(),
            logits_bias=True,
            names=NAMES,
            ignored=(r"transformer\.pos_encoding",),
        ),
    )
