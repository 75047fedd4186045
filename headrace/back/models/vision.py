"""What the families that see share: the sections of their configs, and the encoder beside the
decoder."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError


def parts_of(config: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The text's keys, which older checkpoints have beside the others, and the vision tower's."""
    vision = config.section("vision_config")
    if vision is None:
        raise CheckpointError(f"{config.where}: vision_config is missing", field="vision_config")
    where = f"{config.where}: text_config" if "text_config" in config else config.where
    return ConfigReader(text_config(config.raw), where), vision


def with_media(scope: Scope, decoder: Decoder, encoder: MediaEncoder) -> Decoder:
    """The decoder with what encodes images and more for it."""
    decoder.media = encoder
    kinds = ", ".join(("text", *(form.kind for form in encoder.forms)))
    scope.ledger.note(Decision("model.parts", "auto", kinds, "what the checkpoint takes"))
    return decoder
