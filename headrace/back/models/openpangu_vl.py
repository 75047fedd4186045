"""openPangu-VL (Huawei 2025): openPangu's dense decoder with positions in three axes that are
spread over its pairs, behind Qwen2.5-VL's windows, of whose layers several are merged and added up
(keys and tensor names of the published 7B)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import sections, spread
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.summed import SummedLayers
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import internlm
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.qwen2_vl import MERGER, spaced_axes, windowed_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader

RENAMED = ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model."))
NEWER = ("use_gatedmerger", "use_norm_pre", "deepstack_visual_indexes")
"""Keys of a later tower, which is another one."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OpenPanguVLForConditionalGeneration."""
    text, vision = parts_of(config)
    for key in NEWER:
        if vision.raw.get(key):
            raise vision.wrong(key, "false: the tower of openPangu-VL 7B alone is read")
    values = text.section("rope_parameters") or text.section("rope_scaling")
    spreads = values is not None and values.bool("mrope_interleaved", False)
    turns = spread if spreads else sections
    rope = spaced_axes(scope, text, vision, positions_per_s=None, turns=turns)
    tower = VisionTower(scope / "visual", _tower(vision, read_sizes(text).width), rope)
    return with_media(scope, internlm.build(scope, text), tower, renamed=RENAMED)


def _tower(vision: ConfigReader, outputs: int) -> TowerSpec:
    keys = {"hidden_act": "gelu", "hidden_size": 1536, "intermediate_size": 4608, "depth": 26}
    full = {"fullatt_block_indexes": [5, 12, 19, 25], "window_size": 112, "num_heads": 16}
    vision = ConfigReader({**keys, **full, **vision.raw}, vision.where)
    spec = windowed_tower(vision)
    eps, merger = vision.float("rms_norm_eps", 1e-6, ge=0.0), spec.merger
    assert isinstance(merger, MergerSpec), merger
    chosen = vision.list("mm_unit_vision_select_layer", (-1, -3), of=int)
    layers = tuple(spec.layers + each for each in chosen)
    if (
        not layers
        or min(layers) < 0
        or max(layers) >= spec.layers
        or len(set(layers)) < len(layers)
    ):
        raise vision.wrong("mm_unit_vision_select_layer", f"layers from the end, of {spec.layers}")
    inner, names = spec.layer, spec.layer.names
    if inner.activation != "silu":
        names = replace(names, mlp=("up_proj", "down_proj"))
    return replace(
        spec,
        layer=replace(inner, eps=eps, norm=RMS, names=names),
        merger=SummedLayers(
            count=len(layers),
            merger=replace(merger, eps=eps, names=MERGER),
            projection="vision_projection.fc1",
            outputs=outputs,
        ),
        summed=tuple(sorted(layers, reverse=True)),
        behind="final_layernorm",
        video=False,
        positions_per_s=0.0,
    )
