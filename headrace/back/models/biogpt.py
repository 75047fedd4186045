"""BioGPT: OPT's layers over scaled embeddings (Luo et al. 2022)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.positions import LearnedPositions
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

NAMES = DecoderNames(prefix="biogpt", norm="layer_norm", head="output_projection")
ATTENTION = AttentionNames(out="out_proj")
PLACEMENT = NormPlacement(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")
EPS = 1e-5
"""Whatever `layer_norm_eps` says: transformers' class (5.23) does not read it."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BioGptForCausalLM."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = replace(
        read_sizes(config, kv_heads=heads, gated=False, default_activation="gelu", tied=True),
        eps=EPS,
    )
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
            positions=LearnedPositions(
                name="embed_positions",
                rows=config.int("max_position_embeddings", 1024, ge=1),
                unused=2,
            ),
            names=NAMES,
        ),
    )
