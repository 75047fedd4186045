"""MiniMax-M3 with images: CLIP's layers whose heads turn by time, row and column in equal parts and
keep the rest, two linear layers for each patch, then two for each window (transformers 5.23,
modeling_minimax_m3_vl.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.turns import still_rows_columns
from headrace.back.models import minimax_m3
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    SIGLIP_NAMES,
    LayerDefaults,
    parts_of,
    text_alone,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

DEFAULTS = LayerDefaults(width=1280, heads=16, inner=5120, eps=1e-5, activation="gelu")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLForConditionalGeneration."""
    inside = scope / "language_model"
    if config.section("vision_config") is None:
        text = config.required_section("text_config")
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_tower.vision_model", _tower(config, text, vision))
    return with_media(scope, minimax_m3.build(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    layer = tower_layer(vision, DEFAULTS, SIGLIP_NAMES, rotary=True)
    third = 2 * (layer.head_dim // 3 // 2)
    if not third:
        raise vision.wrong("hidden_size", "six dimensions for each head at least")
    layer = tower_layer(vision, DEFAULTS, SIGLIP_NAMES, rotary=True, rotary_dims=3 * third)
    rope = vision.section("rope_parameters") or vision
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 14, ge=1, le=1024),
            frames=vision.int("temporal_patch_size", 2, ge=1, le=16),
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 32, ge=1),
        projector=PatchesThenWindows(
            width=layer.width,
            inner=config.int("projector_hidden_size", 6144, ge=1),
            outputs=text.int("hidden_size", ge=1),
            merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        ),
        before=TowerNorm(name="pre_layrnorm", norm=LAYER),
        theta=rope.float("rope_theta", 10_000.0, ge=1.0),
        turns=still_rows_columns,
    )


@dataclass(frozen=True, kw_only=True)
class PatchesThenWindows:
    """Two layers for each patch, two for the window they make. `inner`: outputs of the first of
    both."""

    width: int
    inner: int
    outputs: int
    merge: int

    def build(self, scope: Scope) -> PatchesThenWindowsProjector:
        """See ProjectorSpec."""
        return PatchesThenWindowsProjector(scope, self)


class PatchesThenWindowsProjector:
    """x_NE -> y_MF by PatchesThenWindows."""

    def __init__(self, scope: Scope, spec: PatchesThenWindows) -> None:
        patches = TwoLayers(width=spec.width, outputs=spec.outputs, inner=spec.inner)
        windows = TwoLayers(
            width=spec.outputs,
            outputs=spec.outputs,
            inner=spec.inner,
            merge=spec.merge,
            module="patch_merge_mlp",
        )
        self._patches, self._windows = patches.build(scope), windows.build(scope)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        return self._windows.merge(self._patches.merge(x_NE))
