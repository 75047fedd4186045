"""MiniCPM-V 4.6 and MiniCPM-OCR: Qwen 3.5's decoder behind SigLIP's tower at any size, which merges
windows of 2 x 2 patches inside unless it is to show four times the tokens, and behind it (OpenBMB
2026; transformers 5.23, modeling_minicpmv4_6.py; each slice of a picture is an image of its
own)."""

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

UNUSED = r"model\.vision_tower\.vit_merger\..*"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPMV4_6ForConditionalGeneration, MiniCPMOcrForConditionalGeneration."""
    text, vision = parts_of(config)
    mode = "4x" if config.str("model_type") == "minicpm_ocr" else "16x"
    narrows = config.choice("downsample_mode", ("4x", "16x"), mode) == "16x"
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
        narrowed=config.int("insert_layer_id", 6, ge=0, le=layers - 1) if narrows else None,
        rounds=config.int("merger_times", 1, ge=1, le=4),
        outputs=text.int("hidden_size", ge=1),
    )
    tower = NarrowingTower(scope / "model", scope / "model.vision_tower", spec)
    inside = replace(scope, base_within="model.language_model")
    decoder = with_media(scope, text_decoder(inside, text), tower)
    if not narrows:
        ignored = (*decoder.weights.ignored, UNUSED)
        decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder
