"""Idefics 3 and SmolVLM: tiles of one size through SigLIP's tower, windows of patches side by side,
one linear layer (Laurençon et al. 2024; Marafioti et al. 2025; a tile is an image of its own, with
text between them)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerSpec
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    SIGLIP_NAMES,
    parts_of,
    square,
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
    width = vision.int("hidden_size", 1152, ge=1)
    heads = vision.int("num_attention_heads", 16, ge=1)
    patch, side = square(vision)
    merge = config.int("scale_factor", 2, ge=1)
    if side % merge:
        raise config.wrong("scale_factor", f"a divisor of {side} patches a side")
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 3072, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=vision.float("layer_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")],
        norm=LAYER,
        names=SIGLIP_NAMES,
    )
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=OneLayer(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            name="model.connector.modality_projection.proj",
        ),
        side=side,
        positions=("embeddings.position_embedding.weight", (side**2, width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
    )
