"""Qwen 3.5, dense and with experts: Qwen3-Next's layers with projections of their own in the
checkpoint. The text model stands alone, or behind Qwen3-VL's vision tower."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import KEY, QUERY, VALUE, DeltaNames
from headrace.back.layers.vision.tower import VisionTower
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    read_sizes,
)
from headrace.back.models.hybrid import qwen_draft_layer, qwen_mixers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3_next import DRAFTS
from headrace.back.models.qwen3_vl import qwen3_axes, qwen3_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader

DELTA = DeltaNames(
    parts=("q", "k", "v", "in_proj_z", "in_proj_b", "in_proj_a"),
    merged=(MergedTensor(name="in_proj_qkv", parts=(QUERY, KEY, VALUE)),),
    convs=("conv1d",),
    out="out_proj",
)

TIME_SERIES = r"(model\.)?time_series(_forecaster)?\..*"
"""Of Intern-S2, whose time series are not read."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration, InternS2PreviewForConditionalGeneration."""
    if "vision_config" not in config:
        return _decoder(scope, config)
    text, vision = parts_of(config)
    rope = qwen3_axes(
        scope,
        text,
        vision,
        head_dim=read_sizes(text, inner=1).head_dim,
        theta=10_000.0,
        share=0.25,
        lengths=(11, 11, 10),
    )
    tower = VisionTower(scope / "model.visual", qwen3_tower(vision), rope)
    decoder = _decoder(replace(scope, base_within="model.language_model"), text)
    return with_media(scope, decoder, tower)


def _decoder(scope: Scope, config: ConfigReader) -> Decoder:
    mixes = "num_experts" in config
    sizes = read_sizes(config, inner=1 if mixes else None)
    feed_forward = qwen_mixture(config, renormalize=True) if mixes else GATED_MLP
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for mixer in qwen_mixers(scope, config, sizes, DELTA)
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        norm=RMS_UNIT_OFFSET,
        ignored=(DRAFTS, TIME_SERIES),
        draft_layer=qwen_draft_layer(scope, config, sizes, feed_forward),
    )
    return Decoder(scope, spec)
