"""What the files of encoder-decoders say of their images: their encoder reads these, beside text or
alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import CheckpointFiles
from headrace.front.media.processors.reading import image_only
from headrace.front.media.processors.square_families import gemma3
from headrace.front.text import florence2


def _t5gemma2(files: CheckpointFiles) -> MediaSpec | None:
    """Gemma 3's, which the encoder's section states, but for the placeholder."""
    config, encoder = files.config, files.config.section("encoder")
    if encoder is None or "vision_config" not in encoder:
        return None
    token = config.int("image_token_index", 256_001, aliases=("image_token_id",), ge=0)
    return gemma3(
        files.image, ConfigReader({**encoder.raw, "image_token_id": token}, encoder.where)
    )


def _florence2(files: CheckpointFiles) -> MediaSpec:
    """One square, stretched, before all text: a token for each patch of the last stage, and one for
    all of them."""
    image, vision = files.image, files.config.required_section("vision_config")
    side = _side_of(image, 768)
    strides = vision.list("patch_stride", [4, 2, 2, 2], of=int)
    patch = math.prod(strides)
    if side % patch:
        raise image.wrong("size", f"multiples of {patch} pixels")
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        side=side,
        resample=image.int("resample", 3, ge=0, le=5),
        rows_each=(side // patch) ** 2 + 1,
    )
    spec = image_only("square", settings, files.config)
    return msgspec.structs.replace(
        spec, ahead=(), most={"image": 1}, template=florence2.CHAT_TEMPLATE
    )


def _side_of(image: ConfigReader, default: int) -> int:
    """Pixels of the square that pictures are stretched to; CheckpointError where they are cut."""
    if image.bool("do_center_crop", False):
        raise image.wrong("do_center_crop", "false")
    size = image.section("size")
    if size is None:
        return image.int("size", default, ge=1, le=16_384)
    height, width = (size.int(key, default, ge=1, le=16_384) for key in ("height", "width"))
    if height != width:
        raise image.wrong("size", "a square")
    return height


ENCODER_DECODERS: Mapping[str, Callable[[CheckpointFiles], MediaSpec | None]] = {
    "t5gemma2": _t5gemma2,
    "florence2": _florence2,
}
"""By `model_type`."""
