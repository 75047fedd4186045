"""What the files of any checkpoint say of its images, and the specs that follow."""

from __future__ import annotations

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import ImageNorm, MediaSpec, ProcessorSettings


def pixel_bounds(reader: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    """`size` as newer files have it, min_pixels and max_pixels as older ones."""
    size = reader.section("size") or reader
    least = size.int("shortest_edge", reader.int("min_pixels", default[0], ge=1), ge=1)
    most = size.int("longest_edge", reader.int("max_pixels", default[1], ge=1), ge=1)
    return least, max(least, most)


def image_only(processor: str, settings: ProcessorSettings, config: ConfigReader) -> MediaSpec:
    others = ("image_token_index", "media_placeholder_token_id", "img_context_token_id")
    token = config.int("image_token_id", aliases=others, ge=0)
    return MediaSpec(processor=processor, settings=settings, image_token=token, video_token=None)


def with_video(spec: MediaSpec, mark: int | None) -> MediaSpec:
    """Videos too, whose tokens are images' once they are expanded."""
    if mark is None:
        return spec
    return msgspec.structs.replace(spec, video_token=mark, video_soft=spec.image_token)


def vision_section(config: ConfigReader) -> ConfigReader:
    return config.required_section("vision_config")


def side_pixels(vision: ConfigReader, default: int = 0) -> int:
    """`image_size`, which some have as [height, width]."""
    if isinstance(vision.raw.get("image_size"), list):
        return int(vision.list("image_size", of=int)[0])
    return vision.int("image_size", default, ge=1) if default else vision.int("image_size", ge=1)


def patch_pixels(vision: ConfigReader) -> int:
    if isinstance(vision.raw.get("patch_size"), list):
        return int(vision.list("patch_size", of=int)[0])
    return vision.int("patch_size", 14, ge=1, le=1024)


def image_norm(image: ConfigReader) -> ImageNorm | None:
    """What the processor's file says of the values of colours; None: nothing. What is rescaled
    otherwise than by 1 / 255 is refused."""
    stated = image.section("media_proc_cfg") or image
    rescales = stated.bool("do_rescale", True)
    factor = stated.float("rescale_factor", 1 / 255)
    if not rescales or abs(factor * 255 - 1) > 1e-4:
        raise stated.wrong("rescale_factor", "1 / 255, with do_rescale true")
    if not stated.bool("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    if isinstance(stated.raw.get("image_mean"), float):  # one number for all colours
        three = {key: [stated.float(key)] * 3 for key in ("image_mean", "image_std")}
        stated = ConfigReader({**stated.raw, **three}, stated.where)
    mean = stated.list("image_mean", None, of=float, length=3, aliases=("norm_mean",))
    std = stated.list("image_std", None, of=float, length=3, aliases=("norm_std",))
    if mean is None or std is None:
        return None
    if min(std) <= 0:
        raise stated.wrong("image_std", "three positive numbers")
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
