"""Step-3 with images: tiles and the whole through EVA-CLIP's layers with a table of places that is
resized to tiles, two convolutions that halve its sides, one linear layer (Step team 2025; names and
keys of the published checkpoint; a tile is an image of its own, with text between)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.step3p7 import Halving, HalvingSpec
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    SIGLIP_NAMES,
    LayerDefaults,
    parts_of,
    square,
    text_alone,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NAMES: VisionLayerNames = replace(SIGLIP_NAMES, merged="qkv_proj")
EVA = LayerDefaults(width=1792, heads=16, inner=3072, eps=1e-5, activation="quick_gelu")
CLASS_ROWS = 4
"""The published code has so many equal class rows, which all patches see."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Step3VLForConditionalGeneration."""
    inside = replace(scope, base_within="model")
    if config.section("vision_config") is None:
        text = config.required_section("text_config")
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_model", _tower(config, text, vision))
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    sized = {"image_size": 728, "patch_size": 14, **vision.raw}
    patch, side = square(ConfigReader(sized, vision.where))
    if config.int("understand_projector_stride", 2) != 2:
        raise config.wrong("understand_projector_stride", "2")
    layer = tower_layer(vision, EVA, NAMES, after=True)
    middle = vision.int("output_hidden_size", 4096, ge=1)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 63, ge=1),
        projector=HalvingSpec(
            halvings=(
                Halving(
                    name="vit_downsampler", inputs=layer.width, outputs=middle, size=2, padding=0
                ),
                Halving(name="vit_downsampler2", inputs=middle, outputs=2 * middle),
            ),
            outputs=text.int("hidden_size", ge=1),
            bias=config.bool("projector_bias", True),
        ),
        table_side=side,
        resized="bicubic",
        positions=("embeddings.position_embedding.weight", (side**2 + 1, layer.width)),
        class_token=("embeddings.class_embedding", (1, layer.width)),
        class_times=CLASS_ROWS,
        layers_name="transformer.layers",
    )
