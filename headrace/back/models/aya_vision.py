"""Aya Vision and Command A Vision: Cohere's decoders behind SigLIP's tower, windows of patches side
by side and a gated projector (Cohere 2025; a tile is an image of its own)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import GatedLayers
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    OLDER_TOWER,
    parts_of,
    siglip_layer,
    siglip_tower,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AyaVisionForConditionalGeneration, Cohere2VisionForConditionalGeneration."""
    text, vision = parts_of(config)
    aya = config.raw["architectures"][0] == "AyaVisionForConditionalGeneration"
    layer = siglip_layer(vision)
    default = text.int("hidden_size", ge=1) if aya else 36_864
    inner = config.int("alignment_intermediate_size", default, ge=2)
    if inner % 2:
        raise config.wrong("alignment_intermediate_size", "an even number")
    projector = GatedLayers(
        width=layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=config.int("downsample_factor", 2, ge=1),
        inner=inner,
        eps=config.float("adapter_layer_norm_eps", 1e-6, ge=0.0) if aya else None,
    )
    spec = replace(siglip_tower(vision, projector, layer), frames=True)
    if aya:
        spec = replace(spec, behind=None, layers=_num_layers(config, spec.layers))
        tower = PlainTower(scope, scope / "vision_tower", spec)
        decoder = text_decoder(scope / "language_model", text)
        return with_media(scope, decoder, tower, renamed=OLDER_TOWER)
    within = scope / "model"
    tower = PlainTower(within, within / "vision_tower", spec)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)


def _num_layers(config: ConfigReader, layers: int) -> int:
    """Those up to the one whose output is taken."""
    config.choice("vision_feature_select_strategy", ("full",), "full")
    taken = config.int("vision_feature_layer", -1, ge=-layers, le=layers)
    return taken if taken >= 0 else layers + 1 + taken
