"""XGLM: OPT's layers over scaled embeddings and sinusoidal positions (Lin et al. 2022)."""

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

NAMES = DecoderNames(norm="layer_norm")
ATTENTION = AttentionNames(out="out_proj")
PLACEMENT = NormPlacement(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")
POSITIONS = SinusoidalPositions(first=2, spread=1)
EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """XGLMForCausalLM."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        kv_heads=heads,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu",
        eps=EPS,
        tied=True,
        inner=config.int("ffn_dim", 4096, ge=1),
    )
    if config.bool("add_cross_attention", False):
        raise config.wrong("add_cross_attention", "false")
    if sizes.width % 2:
        raise config.wrong("d_model", "an even number: positions are sines and cosines")
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=None, qkv_bias=True, out_bias=True, names=ATTENTION
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(name="", up="fc1", down="fc2", bias=True),
    )
    scaled = config.bool("scale_embedding", True)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            embedding_scale=sizes.width**0.5 if scaled else 1.0,
            positions=POSITIONS,
            names=NAMES,
        ),
    )
