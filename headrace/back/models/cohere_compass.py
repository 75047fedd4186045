"""Cohere's North Micro Vision: Command A's parallel branches with positions in three axes that take
turns, or with none where the config states no rotation for a kind of layer, behind Qwen3-VL's tower
(transformers 5.23, modeling_cohere_compass.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.norm import LAYER_NO_BIAS, PARALLEL
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope, interleaved
from headrace.back.layers.vision.tower import VisionTower
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.qwen3_vl import qwen3_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader

FULL, WINDOW = "full_attention", "sliding_attention"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CohereCompassForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes = read_sizes(text, eps=1e-5, tied=True)
    kinds = _kinds(text, sizes.layers)
    ropes = {kind: _rope(scope, text, sizes, kind) for kind in dict.fromkeys(kinds)}
    turning = {rope for rope in ropes.values() if rope is not None}
    if len(turning) > 1:
        raise text.wrong("rope_parameters", "one rotation for all kinds of layers that rotate")
    axes = None
    if turning:
        axes = _axes(
            scope, text, vision, next(kind for kind in kinds if ropes[kind]), turning.pop()
        )
    tower = VisionTower(scope / "model.visual", qwen3_tower(vision), axes)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, _decoder(inside, text, sizes, kinds, ropes), tower)


def _decoder(
    scope: Scope,
    text: ConfigReader,
    sizes: DecoderSizes,
    kinds: tuple[str, ...],
    ropes: Mapping[str, RopeSpec | None],
) -> Decoder:
    bias, window = text.bool("attention_bias", False), text.int("sliding_window", 4096, ge=1)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=ropes[kind],
                window=window if kind == WINDOW else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            placement=PARALLEL,
        )
        for kind in kinds
    )
    scale = text.float("logit_scale", None, ge=0.0)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=LAYER_NO_BIAS,
            logits_scale=1.0 if scale is None else scale,
        ),
    )


def _kinds(text: ConfigReader, layers: int) -> tuple[str, ...]:
    kinds = text.list("layer_types", None, of=str)
    if kinds is None:
        return (FULL,) * layers
    if len(kinds) != layers or not set(kinds) <= {FULL, WINDOW}:
        raise text.wrong("layer_types", f"{layers} of {FULL}, {WINDOW}")
    return tuple(kinds)


def _rope(scope: Scope, text: ConfigReader, sizes: DecoderSizes, kind: str) -> RopeSpec | None:
    values = text.raw.get("rope_parameters")
    if isinstance(values, Mapping) and kind in values and values[kind] is None:
        return None
    return read_rope(
        text, head_dim=sizes.head_dim, max_positions=scope.max_positions, layer_type=kind
    )


def _axes(
    scope: Scope, text: ConfigReader, vision: ConfigReader, kind: str, rope: RopeSpec
) -> AxesRope:
    values = text.section("rope_parameters") or text
    values = values.section(kind) or values
    stated = values.list("mrope_section", (24, 20, 20), of=int, length=3)
    if sum(stated) != len(rope.frequencies):
        raise values.wrong("mrope_section", f"three numbers with sum {len(rope.frequencies)}")
    merge = vision.int("spatial_merge_size", 2, ge=1)
    return AxesRope(scope, rope, axis_of_pair=interleaved(stated), merge=merge)
