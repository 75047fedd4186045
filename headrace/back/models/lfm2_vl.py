"""LFM2-VL: LFM 2's decoder behind SigLIP 2's tower, whose table of places is resized to each image,
windows of patches side by side and two linear layers (Liquid AI 2025; a tile is an image of its
own, with text between them)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    OLDER_TOWER,
    parts_of,
    siglip_layer,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader

PROJECTOR_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Lfm2VlForConditionalGeneration."""
    text, vision = parts_of(config)
    spec = _tower(config, text, vision)
    tower = PlainTower(scope / "model", scope / "model.vision_tower", spec)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    positions = vision.int("num_patches", 256, ge=1)
    side = int(positions**0.5)
    if side**2 != positions:
        raise vision.wrong("num_patches", "a square")
    layer = siglip_layer(vision)
    width = layer.width
    normed = config.bool("projector_use_layernorm", True)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1),
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
            linear=True,
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=TwoLayers(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=config.int("downsample_factor", 2, ge=1),
            bias=config.bool("projector_bias", True),
            activation=ACTIVATIONS[config.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
            norm=("layer_norm", LAYER, PROJECTOR_EPS) if normed else None,
            norm_merged=True,
            inner=config.int("projector_hidden_size", 2560, ge=1),
        ),
        table_side=side,
        positions=("embeddings.position_embedding.weight", (positions, width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
    )
