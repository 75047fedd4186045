"""Qwen2-VL and Qwen2.5-VL: Qwen 2's decoder with positions in three axes, behind a vision tower of
patches of two frames. Qwen2.5-VL's tower attends within windows in most layers and counts time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope, sections
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import qwen2
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.vision import CLIP_MEAN, CLIP_STD, parts_of, with_media
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MAX_TIME_POSITIONS

EPS = 1e-6
ACTIVATIONS = ("quick_gelu", "gelu", "silu")
MERGER = ("ln_q", "mlp.0", "mlp.2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration."""
    text, vision = parts_of(config)
    windowed = "fullatt_block_indexes" in vision
    spec = windowed_tower(vision) if windowed else _plain(vision)
    if windowed:
        longest = scope.max_positions + MAX_TIME_POSITIONS
        scope = replace(scope, max_positions=longest)
    per_s = vision.float("tokens_per_second", 4, ge=0.0) if windowed else None
    rope = spaced_axes(scope, text, vision, positions_per_s=per_s)
    tower = VisionTower(scope / "visual", spec, rope)
    return with_media(scope, qwen2.build(scope, text), tower)


def spaced_axes(
    scope: Scope,
    text: ConfigReader,
    vision: ConfigReader,
    *,
    positions_per_s: float | None,
    behind_time: bool = False,
    paired_marks: bool = False,
    turns: Callable[[Sequence[int]], tuple[int, ...]] = sections,
) -> AxesRope:
    """The decoder's positions; see AxesRope. `turns`: the axis of each pair, by their counts."""
    sizes = read_sizes(text)
    spec = read_rope(text, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    values = text.section("rope_parameters") or text.section("rope_scaling") or text
    lengths = values.list("mrope_section", (16, 24, 24), of=int, length=3)
    if sum(lengths) != len(spec.frequencies):
        raise values.wrong("mrope_section", f"three numbers with sum {len(spec.frequencies)}")
    return AxesRope(
        scope,
        spec,
        axis_of_pair=turns(lengths),
        merge=vision.int("spatial_merge_size", 2, ge=1),
        positions_per_s=positions_per_s,
        behind_time=behind_time,
        paired_marks=paired_marks,
    )


def _patches(vision: ConfigReader) -> PatchSpec:
    return PatchSpec(
        patch=vision.int("patch_size", 14, aliases=("spatial_patch_size",), ge=1),
        frames=vision.int("temporal_patch_size", 2, ge=1),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        bias=False,
    )


def _plain(vision: ConfigReader) -> TowerSpec:
    """Qwen2-VL's tower."""
    width, heads = vision.int("embed_dim", 1280, ge=1), vision.int("num_heads", 16, ge=1)
    layer = VisionLayerSpec(
        width=width,
        inner=int(width * vision.float("mlp_ratio", 4.0, ge=0.0)),
        heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=vision.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
        norm=LAYER,
        rotary=True,
    )
    return TowerSpec(
        patches=_patches(vision),
        layer=layer,
        layers=vision.int("depth", 32, ge=1),
        merger=MergerSpec(
            width=width,
            outputs=vision.int("hidden_size", 3584, ge=1),
            merge=vision.int("spatial_merge_size", 2, ge=1),
            norm=LAYER,
            eps=EPS,
            names=MERGER,
        ),
    )


def windowed_tower(vision: ConfigReader) -> TowerSpec:
    """Qwen2.5-VL's tower."""
    width, heads = vision.int("hidden_size", 1280, ge=1), vision.int("num_heads", 16, ge=1)
    merge, patches = vision.int("spatial_merge_size", 2, ge=1), _patches(vision)
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 3420, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=vision.choice("hidden_act", ACTIVATIONS, "silu"),
        norm=RMS,
        rotary=True,
        names=VisionLayerNames(mlp=("gate_proj", "up_proj", "down_proj")),
    )
    side = vision.int("window_size", 112, ge=1) // merge // patches.patch
    if side < 1:
        raise vision.wrong("window_size", f"at least {merge * patches.patch} pixels")
    return TowerSpec(
        patches=patches,
        layer=layer,
        layers=vision.int("depth", 32, ge=1),
        merger=MergerSpec(
            width=width,
            outputs=vision.int("out_hidden_size", 3584, ge=1),
            merge=merge,
            norm=RMS,
            eps=EPS,
            names=MERGER,
        ),
        window=side,
        full_layers=vision.list("fullatt_block_indexes", (7, 15, 23, 31), of=int),
        positions_per_s=vision.float("tokens_per_second", 4, ge=0.0),
    )
