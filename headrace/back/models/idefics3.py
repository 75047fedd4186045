"""Idefics 3 and SmolVLM: tiles of one size through SigLIP's tower, windows of patches side by side,
one linear layer (Laurençon et al. 2024; Marafioti et al. 2025; a tile is an image of its own, with
text between them)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    parts_of,
    siglip_layer,
    siglip_tower,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "model.vision_model", _tower(config, text, vision))
    inside = replace(scope, base_within="model.text_model")
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    layer = siglip_layer(vision, default_width=1152, default_heads=16)
    projector = OneLayer(
        width=layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=config.int("scale_factor", 2, ge=1),
        name="model.connector.modality_projection.proj",
    )
    return siglip_tower(vision, projector, layer)
