"""PaliGemma 1 and 2: Gemma's and Gemma 2's decoder behind SigLIP's tower and one linear layer. All
tokens of a prompt see each other, those of the answer what is before them (Beyer et al. 2024,
section 3.1)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    OLDER_TOWER,
    parts_of,
    siglip_tower,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PaliGemmaForConditionalGeneration."""
    text, vision = parts_of(config)
    both = "use_bidirectional_attention"
    if not text.bool(both, True):
        raise text.wrong(both, "true")
    text = ConfigReader({k: v for k, v in text.raw.items() if k != both}, text.where)
    projector = OneLayer(
        width=vision.int("hidden_size", 768, ge=1),
        outputs=text.int("hidden_size", ge=1),
        merge=1,
        name="multi_modal_projector.linear",
        bias=True,
    )
    spec = replace(siglip_tower(vision, projector), mutual="prompt")
    tower = PlainTower(scope, scope / "vision_tower", spec)
    inside = replace(scope / "language_model", mutual="all")
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)
