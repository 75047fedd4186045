"""BLIP-2 with OPT: a vision transformer, all of whose rows learned queries read through a Q-former,
and one linear layer before the decoder (Li et al. 2023; transformers 5.23, modeling_blip_2.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.layers.audio.query_windows import QueryWindows, QueryWindowsSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    parts_of,
    square,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NAMES = VisionLayerNames(
    before_attention="layer_norm1",
    before_mlp="layer_norm2",
    attention="self_attn",
    out="projection",
)
DEFAULTS = LayerDefaults(width=1408, heads=16, inner=6144, activation="gelu")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Blip2ForConditionalGeneration."""
    text, vision = parts_of(config)
    # The decoder is tied or not by itself, whatever the whole model's config says.
    tied = config.raw["text_config"].get("tie_word_embeddings", True)
    text = ConfigReader({**text.raw, "tie_word_embeddings": tied}, text.where)
    tower = PlainTower(scope, scope / "vision_model", _tower(config, text, vision))
    return with_media(scope, text_decoder(scope / "language_model", text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    patch, side = square(vision)
    layer = tower_layer(vision, DEFAULTS, NAMES, bias=vision.bool("qkv_bias", True))
    queries = config.int("num_query_tokens", 32, ge=1, le=4096)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 39, ge=1),
        projector=QueriesSpec(reads=_queries(config, text, layer.width, queries)),
        side=side,
        positions=("embeddings.position_embedding", (1, side**2 + 1, layer.width)),
        class_token=("embeddings.class_embedding", (1, 1, layer.width)),
        class_kept=True,
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        rows_each=queries,
    )


def _queries(
    config: ConfigReader, text: ConfigReader, inputs: int, queries: int
) -> QueryWindowsSpec:
    former = config.section("qformer_config") or ConfigReader({}, config.where)
    former.choice("hidden_act", ("gelu",), "gelu")
    if former.int("encoder_hidden_size", inputs, ge=1) != inputs:
        raise former.wrong("encoder_hidden_size", f"the tower's width ({inputs})")
    return QueryWindowsSpec(
        inputs=inputs,
        width=former.int("hidden_size", 768, ge=1),
        inner=former.int("intermediate_size", 3072, ge=1),
        heads=former.int("num_attention_heads", 12, ge=1),
        layers=former.int("num_hidden_layers", 12, ge=1),
        every=former.int("cross_attention_frequency", 2, ge=1),
        eps=former.float("layer_norm_eps", 1e-12, ge=0.0),
        queries=queries,
        outputs=text.int("hidden_size", ge=1),
        names=("query_tokens", "language_projection"),
    )


@dataclass(frozen=True, kw_only=True)
class QueriesSpec:
    """Queries that read all rows of an image, whose grids have one size."""

    reads: QueryWindowsSpec
    merge: int = 1

    @property
    def outputs(self) -> int:
        """See ProjectorSpec."""
        return self.reads.outputs

    def build(self, scope: Scope) -> ImageQueries:
        """See ProjectorSpec."""
        return ImageQueries(scope, self.reads)


class ImageQueries:
    """x_NE -> y_MF by QueriesSpec; `GridProjector`."""

    def __init__(self, scope: Scope, spec: QueryWindowsSpec) -> None:
        self._queries = QueryWindows(scope, spec)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image."""
        return self._queries.forward(x_NE[None])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        return self._queries.forward(x_NE.unflatten(0, (len(grids), -1)))
