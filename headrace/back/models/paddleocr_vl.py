"""PaddleOCR-VL: ERNIE 4.5's decoder, with positions in three axes and halves of heads rotated,
behind SigLIP's tower at any size, with a resampled table of places and rotary ones (Cui et al.
2025, PaddleOCR-VL)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope, sections
from headrace.back.layers.vision.grids import bilinear_cells
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.ernie4_5 import ernie_decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    parts_of,
    siglip_layer,
    square,
    with_media,
)
from headrace.base.config.hf import ConfigReader

WITHIN = "visual.vision_model"
PROJECTOR_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PaddleOCRVLForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = VisionTower(scope, _tower(text, vision), _rope(scope, text, vision))
    return with_media(scope, ernie_decoder(scope, text, layout="half"), tower)


def _rope(scope: Scope, text: ConfigReader, vision: ConfigReader) -> AxesRope:
    spec = read_rope(
        text,
        head_dim=read_sizes(text).head_dim,
        max_positions=scope.max_positions,
        default_theta=500_000.0,
    )
    values = text.section("rope_parameters") or text.section("rope_scaling") or text
    lengths = values.list("mrope_section", (16, 24, 24), of=int, length=3)
    if sum(lengths) != len(spec.frequencies):
        raise values.wrong("mrope_section", f"three numbers with sum {len(spec.frequencies)}")
    merge = vision.int("spatial_merge_size", 2, ge=1)
    return AxesRope(scope, spec, axis_of_pair=sections(lengths), merge=merge)


def _tower(text: ConfigReader, vision: ConfigReader) -> TowerSpec:
    patch, side = square(vision)
    layer = replace(siglip_layer(vision, default_width=1152, default_heads=16), rotary=True)
    ropes = vision.section("rope_parameters") or vision
    return TowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            name=f"{WITHIN}.embeddings.patch_embedding",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 27, ge=1),
        merger=MergerSpec(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            merge=vision.int("spatial_merge_size", 2, ge=1),
            norm=LAYER,
            eps=PROJECTOR_EPS,
            names=("pre_norm", "linear_1", "linear_2"),
        ),
        positions=side**2,
        taps=bilinear_cells,
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        video=False,
        behind=f"{WITHIN}.post_layernorm",
        names=(
            f"{WITHIN}.encoder.layers",
            "mlp_AR",
            "",
            f"{WITHIN}.embeddings.position_embedding",
        ),
    )
