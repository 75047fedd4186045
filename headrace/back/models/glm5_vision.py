"""GLM-5.3 as it sees: GLM-OCR's tower, its gated MLPs within a bound, before GLM-5.3's decoder,
whose positions are those of text (transformers 5.23, modeling_glm5_next.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.reducer import ReducerSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import glm5_next
from headrace.back.models.blocks import Decoder
from headrace.back.models.glm4v import ocr_tower
from headrace.back.models.vision import parts_of, text_alone, with_media
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Glm5NextForConditionalGeneration."""
    inside = replace(scope, base_within="model.language_model")
    if config.section("vision_config") is None:
        text = config.required_section("text_config")
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = VisionTower(scope / "model.visual", _tower(vision), None)
    tower.forms = tuple(form for form in tower.forms if form.kind == "image")
    decoder = with_media(scope, glm5_next.build(inside, text), tower)
    ignored = tuple(one for one in decoder.weights.ignored if one != glm5_next.VISUAL)
    decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder


def _tower(vision: ConfigReader) -> TowerSpec:
    whole, bound = ocr_tower(vision), vision.float("swiglu_limit", 10.0, ge=1e-6)
    assert isinstance(whole.merger, ReducerSpec)
    merger = replace(
        whole.merger,
        inner=vision.int("projection_intermediate_size", 10_240, ge=1),
        bound=bound,
    )
    return replace(whole, layer=replace(whole.layer, bound=bound), merger=merger)
