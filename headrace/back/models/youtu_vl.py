"""Youtu-VL: Youtu-LLM's decoder behind SigLIP 2's layers with places that turn, most of which see
windows alone, and Qwen's merger (Tencent 2026; names and keys of the published checkpoint; images,
whose positions are those of text)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import youtu
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import HALF, parts_of, siglip_layer, with_media
from headrace.base.config.hf import ConfigReader

TOWER = "siglip2.vision_model"
RENAMED = ((r"merger\.(.*)", rf"{TOWER}.merger.\1"),)
UNREAD = (r"siglip2\.vision_model\.(embeddings\.position_embedding|head)\..*",)
FULL_LAYERS = (7, 15, 23, 26)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """YoutuVLForConditionalGeneration."""
    text, vision = parts_of(config)
    outputs = text.int("hidden_size", ge=1)
    if vision.int("out_hidden_size", outputs) != outputs:
        raise vision.wrong("out_hidden_size", f"hidden_size of the text ({outputs})")
    tower = VisionTower(scope / TOWER, _tower(vision, outputs), None)
    decoder = with_media(scope, youtu.build(scope, text), tower, renamed=RENAMED)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _tower(vision: ConfigReader, outputs: int) -> TowerSpec:
    patch = vision.int("patch_size", 16, ge=1, le=1024)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    layers = vision.int("num_hidden_layers", 27, ge=1)
    window = vision.int("window_size", 256, ge=1) // merge // patch
    if window < 1:
        raise vision.wrong("window_size", f"at least {merge * patch} pixels")
    layer = replace(siglip_layer(vision, default_width=1152, default_heads=16), rotary=True)
    return TowerSpec(
        patches=PatchSpec(
            patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding", linear=True
        ),
        layer=layer,
        layers=layers,
        merger=MergerSpec(
            width=layer.width,
            outputs=outputs,
            merge=merge,
            norm=RMS,
            eps=1e-6,
            names=("ln_q", "mlp.0", "mlp.2"),
        ),
        window=window,
        full_layers=vision.list("fullatt_block_indexes", FULL_LAYERS, of=int),
        video=False,
        behind="post_layernorm",
        names=("encoder.layers", "merger", "", ""),
    )
