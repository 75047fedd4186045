"""MiniCPM-V 4.6: Qwen 3.5's decoder behind SigLIP's tower at any size, which merges windows of
2 x 2 patches inside and again behind it (OpenBMB 2026; transformers 5.23, modeling_minicpmv4_6.py;
each slice of a picture is an image of its own)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.narrowing_tower import NarrowingTower, NarrowingTowerSpec
from headrace.back.layers.vision.patches import PatchSpec
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


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPMV4_6ForConditionalGeneration."""
    text, vision = parts_of(config)
    config.choice("downsample_mode", ("16x",), "16x")
    for reader, key in ((vision, "window_kernel_size"), (config, "merge_kernel_size")):
        if reader.list(key, [2, 2], of=int, length=2) != (2, 2):
            raise reader.wrong(key, "[2, 2]")
    _, side = square(vision)
    layers = vision.int("num_hidden_layers", 12, ge=1)
    spec = NarrowingTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1, le=1024),
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
        ),
        layer=siglip_layer(vision),
        layers=layers,
        side=side,
        narrowed=config.int("insert_layer_id", 6, ge=0, le=layers - 1),
        rounds=config.int("merger_times", 1, ge=1, le=4),
        outputs=text.int("hidden_size", ge=1),
    )
    tower = NarrowingTower(scope / "model", scope / "model.vision_tower", spec)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower)
