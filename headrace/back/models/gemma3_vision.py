"""Gemma 3 with images: SigLIP's tower, the mean of each window of patches, a norm and one linear
layer. The tokens of an image see each other (Gemma Team 2025, section 2)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import PooledLayer
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    OLDER_TOWER,
    parts_of,
    siglip_tower,
    square,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma3ForConditionalGeneration."""
    text, _ = parts_of(config)
    tower = gemma_tower(scope, config, text, mutual="input")
    inside = replace(scope / "language_model", mutual="window")
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)


def gemma_tower(
    scope: Scope, config: ConfigReader, text: ConfigReader, *, mutual: str
) -> PlainTower:
    """The tower of a config with `vision_config`, before a text of this one; `mutual`: see
    MediaForm."""
    vision = config.required_section("vision_config")
    projector = PooledLayer(
        width=vision.int("hidden_size", 768, ge=1),
        outputs=text.int("hidden_size", ge=1),
        merge=tokens_merge(config, vision),
        norm=("mm_soft_emb_norm", RMS_UNIT_OFFSET, vision.float("layer_norm_eps", 1e-6, ge=0.0)),
        weight="mm_input_projection_weight",
    )
    spec = replace(siglip_tower(vision, projector), mutual=mutual)
    return PlainTower(scope, scope / "vision_tower", spec)


def tokens_merge(config: ConfigReader, vision: ConfigReader) -> int:
    """Patches a side of a window, so that an image has `mm_tokens_per_image` tokens."""
    _, side = square(vision)
    tokens = config.int("mm_tokens_per_image", 256, ge=1)
    columns = int(tokens**0.5)
    if columns**2 != tokens or side % columns:
        raise config.wrong(
            "mm_tokens_per_image", f"the square of a divisor of {side} patches a side"
        )
    return side // columns
