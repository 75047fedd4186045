"""EXAONE 4.5: EXAONE 4's decoder behind Qwen2.5-VL's tower with fewer heads of keys and values; its
positions are those of text (LG AI Research 2026)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.tower import VisionTower
from headrace.back.models import exaone4
from headrace.back.models.blocks import Decoder
from headrace.back.models.qwen2_vl import windowed_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Exaone4_5_ForConditionalGeneration."""
    text, vision = parts_of(config)
    spec = windowed_tower(vision)
    heads = vision.int("num_key_value_heads", 8, ge=1)
    if spec.layer.heads % heads:
        raise vision.wrong("num_key_value_heads", f"a divisor of num_heads ({spec.layer.heads})")
    spec = replace(spec, layer=replace(spec.layer, kv_heads=heads), positions_per_s=0.0)
    tower = VisionTower(scope / "model.visual", spec, None)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, exaone4.build(inside, text), tower)
