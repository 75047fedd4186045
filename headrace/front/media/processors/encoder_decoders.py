"""What the files of encoder-decoders say of their images: their encoder reads these, beside text or
alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import CheckpointFiles
from headrace.front.media.processors.reading import image_only, patch_pixels, side_pixels
from headrace.front.media.processors.square_families import gemma3
from headrace.front.text import florence2
from headrace.front.text.tokenizer import BREAK


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


def _seeing_alone(files: CheckpointFiles) -> MediaSpec | None:
    """VisionEncoderDecoder: its encoder reads one image. What fills the decoder's texts up stands
    for it, as its tokenizer has no placeholder."""
    config, encoder = files.config, files.config.section("encoder")
    decoder = config.section("decoder")
    if encoder is None or decoder is None or encoder.str("model_type", "") not in _ALONE:
        return None
    kind = encoder.str("model_type")
    token = config.int("pad_token_id", decoder.int("pad_token_id", 1, ge=0), ge=0)
    name, settings = _ALONE[kind](files.image, encoder)
    return MediaSpec(
        processor=name,
        settings=settings,
        image_token=token,
        video_token=None,
        ahead=(),
        alone=True,
        most={"image": 1},
        template=_TEXT_ALONE,
    )


_TEXT_ALONE = """\
{%- if messages|length != 1 -%}
{{ raise_exception("this model answers one message, without others before it") }}
{%- endif -%}
{%- set content = messages[0].content -%}
{%- if content is not string -%}
{%- set content = content | map(attribute="text") | join("\\n") -%}
{%- endif -%}
{{- content | replace("@BREAK", "") -}}
""".replace("@BREAK", BREAK)
"""Of a text that the decoder begins with, which is a task in the model's own control tokens."""


def _vit(image: ConfigReader, vision: ConfigReader) -> tuple[str, ProcessorSettings]:
    """One square, stretched: a token for each patch, and one or two for all of them."""
    patch, pixels = patch_pixels(vision), side_pixels(vision, 224)
    side = _side_of(image, pixels)
    if side != pixels:
        raise image.wrong("size", f"the encoder's image_size ({pixels})")
    tokens = 2 if vision.str("model_type") == "deit" else 1
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        side=side,
        resample=image.int("resample", 2, ge=0, le=5),
        rows_each=(side // patch) ** 2 + tokens,
    )
    return "square", settings


def _swin(image: ConfigReader, vision: ConfigReader) -> tuple[str, ProcessorSettings]:
    """One rectangle, in squares that become one token each."""
    size = vision.raw.get("image_size", 224)
    height, width = size if isinstance(size, list) else (size, size)
    stages = vision.list("depths", [2, 2, 6, 2], of=int)
    square = vision.int("patch_size", 4, ge=1, le=64) * 2 ** (len(stages) - 1)
    stated = image.section("size")
    named = image.raw.get("size")  # older files: width and height
    filled = (height, width)
    if isinstance(named, list):
        filled = tuple(named[::-1])
    elif stated is not None:
        filled = (stated.int("height", height, ge=1), stated.int("width", width, ge=1))
    if filled != (height, width) or height % square or width % square:
        raise image.wrong("size", f"the encoder's image_size ({height} x {width} pixels)")
    for key in ("do_resize", "do_thumbnail", "do_pad"):
        if not image.bool(key, True):
            raise image.wrong(key, "true")
    trims = (
        "nougat"
        in image.str("image_processor_type", image.str("feature_extractor_type", "")).lower()
    )
    settings = ProcessorSettings(
        patch=square,
        merge=1,
        sizes=((height, width),),
        resample=image.int("resample", 2, ge=0, le=5),
        turned=image.bool("do_align_long_axis", False),
        trimmed=image.bool("do_crop_margin", trims),
        rows_each=height // square * (width // square),
    )
    return "nougat" if trims else "donut", settings


_ALONE: Mapping[str, Callable[[ConfigReader, ConfigReader], tuple[str, ProcessorSettings]]] = {
    **dict.fromkeys(("vit", "deit"), _vit),
    "donut-swin": _swin,
}
"""By the encoder's `model_type`."""
ENCODER_DECODERS: Mapping[str, Callable[[CheckpointFiles], MediaSpec | None]] = {
    "t5gemma2": _t5gemma2,
    "florence2": _florence2,
    "vision-encoder-decoder": _seeing_alone,
}
"""By `model_type`."""
