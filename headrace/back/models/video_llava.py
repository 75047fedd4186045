"""Video-LLaVA: a tower of CLIP's shape for images and one for video, of whose frames the class
token is shown too, before one projection and a decoder of another family (Lin et al. 2023; a frame
is an input of its own)."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.llava import still_tower
from headrace.back.models.vision import parts_of, text_decoder, with_media
from headrace.base.config.hf import ConfigReader

OLDER = ((r"(.*(?:image|video)_tower)\.vision_model\.(.*)", r"\1.\2"),)
"""How older checkpoints name the tensors of the towers."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """VideoLlavaForConditionalGeneration."""
    text, vision = parts_of(config)
    spec = still_tower(config, text, vision)
    if spec.class_token is None:
        raise vision.wrong("model_type", "clip_vision_model")
    images = PlainTower(scope, scope / "image_tower", spec)
    frames = PlainTower(scope, scope / "video_tower", replace(spec, class_kept=True))
    frames.forms = tuple(
        msgspec.structs.replace(form, kind="video", extra=1) for form in frames.forms
    )
    decoder = text_decoder(scope / "language_model", text)
    return with_media(scope, decoder, Towers(images, frames), renamed=OLDER)
