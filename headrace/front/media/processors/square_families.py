"""What the files of checkpoints say whose images are one square, or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import CheckpointFiles
from headrace.front.media.processors.files import special_text
from headrace.front.media.processors.reading import (
    image_only,
    patch_pixels,
    side_pixels,
    vision_section,
)

PIXELS = 768
"""A side of Gemma 3n's images."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def gemma3(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    """Marks in the prompt are those that begin an image."""
    if image.bool("do_pan_and_scan", None):
        raise image.wrong("do_pan_and_scan", "false")
    vision = vision_section(config)
    patch, side = vision.int("patch_size", 14, ge=1, le=1024), side_pixels(vision)
    tokens = config.int("mm_tokens_per_image", 256, ge=1)
    settings = ProcessorSettings(
        patch=patch,
        merge=max(1, side // patch // int(tokens**0.5)),
        side=side,
        resample=image.int("resample", 2, ge=0, le=5),
        around=("\n\n<start_of_image>", "<end_of_image>\n\n"),
    )
    mark = config.int("boi_token_index", 255_999, aliases=("boi_token_id",), ge=0)
    spec = image_only("square", settings, config)
    return msgspec.structs.replace(spec, image_mark=mark, joins_newlines=True)


def _gemma3n(files: CheckpointFiles) -> MediaSpec:
    """Behind the places of a square stands the token that ends it, which the tower has."""
    image, config = files.image, files.config
    size = image.section("size")
    for side in ("height", "width"):
        if size is not None and size.int(side, PIXELS, ge=1) != PIXELS:
            raise size.wrong(side, str(PIXELS))
    count = config.int("vision_soft_tokens_per_image", 256, ge=1, le=4096)
    begin = config.int("boi_token_id", 255_999, aliases=("boi_token_index",), ge=0)
    settings = ProcessorSettings(
        patch=48,
        merge=1,
        side=PIXELS,
        resample=image.int("resample", 2, ge=0, le=5),
        rows_each=count + 1,
        around=("\n\n" + special_text(files.folder, begin), "\n\n"),
    )
    spec = image_only("square", settings, config)
    return msgspec.structs.replace(spec, joins_newlines=True)


def _blip(files: CheckpointFiles) -> MediaSpec:
    """One square, stretched, of so many tokens."""
    image, vision = files.image, vision_section(files.config)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=1,
        side=side_pixels(vision, 224),
        resample=image.int("resample", 3, ge=0, le=5),
        rows_each=files.config.int("num_query_tokens", 32, ge=1, le=4096),
    )
    return image_only("square", settings, files.config)


def _video_llava(files: CheckpointFiles) -> MediaSpec:
    """The middle square of an image and of each frame."""
    image, config = files.image, files.config
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        side=side_pixels(vision, 224),
        fit="crop",
        resample=image.int("resample", 3, ge=0, le=5),
        max_frames=files.video.int("num_frames", 8, ge=1, le=100_000),
        extra=1,
    )
    spec = image_only("cropped_frames", settings, config)
    token = config.int("video_token_id", None, aliases=("video_token_index",), ge=0)
    return msgspec.structs.replace(spec, video_token=token)


def _got(files: CheckpointFiles) -> MediaSpec:
    """One square, stretched; the text around it is the template's."""
    image, vision = files.image, vision_section(files.config)
    if image.bool("crop_to_patches", False):
        raise image.wrong("crop_to_patches", "false")
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=4,
        side=side_pixels(vision, 1024),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("square", settings, files.config)


def _deepseek_vl(files: CheckpointFiles) -> MediaSpec:
    """One square that a picture is fitted into; Janus has marks around it."""
    image, vision = files.image, vision_section(files.config)
    mean = image.list("image_mean", [0.48145466, 0.4578275, 0.40821073], of=float, length=3)
    janus = files.config.raw["model_type"] == "janus"
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=1,
        side=side_pixels(vision, 384),
        fit="inside",
        shortest=image.int("min_size", 14, ge=1, le=1024),
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
        around=("<begin_of_image>", "<end_of_image>") if janus else ("", ""),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("square", settings, files.config)


def _deepseek_hybrid(files: CheckpointFiles) -> MediaSpec:
    """A large square that a picture is fitted into, and a small one."""
    image, spec = files.image, _deepseek_vl(files)
    large = files.config.section("high_res_vision_config") or ConfigReader({}, image.where)
    side, small = large.int("image_size", 1024, ge=1, le=16_384), spec.settings.side
    mean = image.list("high_res_image_mean", CLIP_MEAN, of=float, length=3)
    std = image.list("high_res_image_std", CLIP_STD, of=float, length=3)
    if (tuple(mean), tuple(std)) != (CLIP_MEAN, CLIP_STD):
        raise image.wrong("high_res_image_mean", f"{CLIP_MEAN}, with deviations {CLIP_STD}")
    settings = msgspec.structs.replace(
        spec.settings,
        side=side,
        sizes=((small, small),),
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
    )
    return msgspec.structs.replace(spec, processor="two_squares", settings=settings)


SQUARE_FAMILIES: Mapping[str, Callable[[CheckpointFiles], MediaSpec]] = {
    "blip-2": _blip,
    "gemma3": lambda files: gemma3(files.image, files.config),
    "gemma3n": _gemma3n,
    "video_llava": _video_llava,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": _deepseek_hybrid,
    "janus": _deepseek_vl,
    "got_ocr2": _got,
}
"""By `model_type`."""
