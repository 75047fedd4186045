"""OPT: layer norms, learned positions behind two unused rows, biases (Zhang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, LAYER_NO_WEIGHT, NormPlacement
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
from headrace.back.models.decoder_layer import DecoderLayerSpec
from headrace.back.models.families import HEADS
from headrace.back.models.post_norm_layer import PostNormLayerSpec
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="model.decoder", norm="final_layer_norm")
ATTENTION = AttentionNames(out="out_proj")
NORMS = ("self_attn_layer_norm", "final_layer_norm")
PLACEMENT = NormPlacement(before_attention=NORMS[0], before_mlp=NORMS[1])
EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OPTForCausalLM, with norms before its branches; the one of 350M has them behind, and smaller
    embeddings between two projections."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        kv_heads=heads,
        activation=("activation_function",),
        gated=False,
        default_activation="relu",
        eps=EPS,
        tied=True,
    )
    before = config.bool("do_layer_norm_before", True)
    if config.bool("_remove_final_layer_norm", False):
        raise config.wrong("_remove_final_layer_norm", "false")
    embedded = config.int("word_embed_proj_dim", sizes.width, ge=1)
    bias = config.bool("enable_bias", True)
    attention = AttentionSpec(
        **plain_attention(sizes), rope=None, qkv_bias=bias, out_bias=bias, names=ATTENTION
    )
    mlp = PlainMLPSpec(name="", up="fc1", down="fc2", bias=bias)
    layer: DecoderLayerSpec = LayerSpec(mixer=attention, placement=PLACEMENT, feed_forward=mlp)
    if not before:
        layer = PostNormLayerSpec(mixer=attention, feed_forward=mlp, norms=NORMS)
    weighted = config.bool("layer_norm_elementwise_affine", True)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER if weighted else LAYER_NO_WEIGHT,
            positions=LearnedPositions(
                name="embed_positions",
                rows=config.int("max_position_embeddings", 2048, ge=1),
                unused=2,
            ),
            streams=None if embedded == sizes.width else ProjectedSpec(outer=embedded),
            embedding_width=embedded,
            names=NAMES if before else replace(NAMES, norm=None),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ProjectedSpec:
    """A residual wider than embeddings, which are `outer` wide."""

    outer: int

    def build(self, scope: Scope, width: int) -> Projected:
        """See ResidualStreamsSpec."""
        return Projected(scope, self.outer, width)


class Projected:
    """See ProjectedSpec."""

    def __init__(self, scope: Scope, outer: int, width: int) -> None:
        self._in = WholeLinear(scope / "project_in", outer, width)
        self._out = WholeLinear(scope / "project_out", width, outer)

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The residual of the tokens' embeddings."""
        return self._in.project(x_TE)

    def end(self, x_TE: torch.Tensor) -> torch.Tensor:
        """What the head reads."""
        return self._out.project(x_TE)
