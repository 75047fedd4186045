"""Aria: Llama's decoder with experts in every layer, behind SigLIP's layers and learned queries
that read what the last of them gives (Li et al. 2024, Aria; transformers 5.23,
modeling_aria.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    HALF,
    parts_of,
    siglip_layer,
    square,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader

EPS = 1e-5
QUERIES = {"1225": 128, "4900": 256}
UNUSED = (r"vision_tower\.post_layernorm\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AriaForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_tower", _tower(config, text, vision))
    decoder = with_media(scope, text_decoder(scope / "language_model", text), tower)
    weights = decoder.weights
    decoder.weights = replace(weights, ignored=(*weights.ignored, *UNUSED))
    return decoder


def queries_of(config: ConfigReader) -> tuple[int, int]:
    """Patches of the largest images there are, and the tokens of one."""
    if config.int("vision_feature_layer", -1) != -1:
        raise config.wrong("vision_feature_layer", "-1")
    stated = config.raw.get("projector_patch_to_query_dict") or QUERIES
    patches = max(int(key) for key in stated)
    return patches, int(stated[str(patches)])


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    patch, side = square(vision)
    layer = siglip_layer(vision, default_width=1152, default_heads=16)
    _, queries = queries_of(config)
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=ReadingSpec(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            queries=queries,
            heads=layer.heads,
        ),
        table_side=side,
        shares=True,
        positions=("embeddings.position_embedding.weight", (side**2, layer.width)),
        rows_each=queries,
    )


@dataclass(frozen=True, kw_only=True)
class ReadingSpec:
    """`queries` tokens of an image by one attention of `heads` heads and two layers."""

    width: int
    outputs: int
    queries: int
    heads: int
    merge: int = 1

    def build(self, scope: Scope) -> ReadingQueries:
        """See ProjectorSpec."""
        return ReadingQueries(scope / "multi_modal_projector", self)


class ReadingQueries:
    """x_NE -> y_MF, Q rows for each image; `GridProjector`. Each of query, key and value goes
    through two linear layers, which are one here."""

    def __init__(self, scope: Scope, spec: ReadingSpec) -> None:
        self._scope, self._spec, width = scope, spec, spec.width
        inside = scope / "cross_attn"
        attention = inside / "multihead_attn"
        self._queries = scope.param("query", (spec.queries, width))
        self._first = [
            inside.param(f"{name}_proj.weight", (width, width)) for name in ("q", "k", "v")
        ]
        self._weight = attention.param("in_proj_weight", (3 * width, width))
        self._bias = attention.param("in_proj_bias", (3 * width,), init="zeros")
        self._out = WholeLinear(attention / "out_proj", width, width, bias=True)
        self._last = WholeLinear(inside / "linear", width, width, bias=True)
        self._query_norm, self._norm = (
            LAYER.build(inside / name, width, eps=EPS) for name in ("layer_norm", "layer_norm_kv")
        )
        self._behind = LAYER.build(scope / "layer_norm", width, eps=EPS)
        mlp = scope / "feed_forward"
        self._up = WholeLinear(mlp / "linear_in", width, spec.outputs)
        self._down = WholeLinear(mlp / "linear_out", spec.outputs, spec.outputs)
        self._activation = ElementwiseActivation(scope, "gelu_tanh")
        self._query_HQD = torch.empty(0)
        self._keys: Linear = not_loaded
        self._values: Linear = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image of one row."""
        return self.merge_grids(x_NE, [(1, 1, x_NE.shape[0])])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        x_NE, lengths = self._norm.norm(x_NE), [t * h * w for t, h, w in grids]
        keys, values = self._keys(x_NE).split(lengths), self._values(x_NE).split(lengths)
        rows = []
        for image in zip(keys, values, strict=True):
            key, value = (one.unflatten(1, (self._spec.heads, -1)).transpose(0, 1) for one in image)
            y_HQD = F.scaled_dot_product_attention(self._query_HQD, key, value)
            rows.append(y_HQD.transpose(0, 1).flatten(1))
        y_ME = self._last.project(self._out.project(torch.cat(rows)))
        up_MF = self._up.project(self._behind.norm(y_ME))
        return self._down.project(self._activation.apply(up_MF))

    def _finish(self) -> None:
        parts = zip(
            self._weight.take().chunk(3), self._bias.take().chunk(3), self._first, strict=True
        )
        query, key, value = (
            ((second.float() @ first.take().float()).to(second.dtype), bias.contiguous())
            for second, bias, first in parts
        )
        query_QE = F.linear(self._query_norm.norm(self._queries.take().contiguous()), *query)
        self._query_HQD = query_QE.unflatten(1, (self._spec.heads, -1)).transpose(0, 1).contiguous()
        self._keys, self._values = (bind_linear(self._scope, *one) for one in (key, value))
