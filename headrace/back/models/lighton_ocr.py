"""LightOnOCR: Qwen 3's decoder behind Pixtral's tower and Mistral 3's merger of windows (LightOn
2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.llava import pixtral_tower
from headrace.back.models.vision import parts_of, text_decoder, with_media
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LightOnOcrForConditionalGeneration."""
    text, vision = parts_of(config)
    projector = TwoLayers(
        width=vision.int("hidden_size", 1024, ge=1),
        outputs=text.int("hidden_size", ge=1),
        merge=config.int("spatial_merge_size", 2, ge=1),
        bias=False,
        norm=("norm", RMS, text.float("rms_norm_eps", 1e-6, ge=0.0)),
        reduced="patch_merger.merging_layer",
        module="vision_projection",
    )
    spec = pixtral_tower(vision, projector, vision.int("num_hidden_layers", 24, ge=1))
    within = scope / "model"
    tower = PlainTower(within, within / "vision_encoder", replace(spec, breaks=0))
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower)
