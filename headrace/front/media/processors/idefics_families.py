"""What the files of Idefics 3, and of those that see as it does, say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import CheckpointFiles
from headrace.front.media.processors.files import special_token
from headrace.front.media.processors.reading import (
    image_only,
    patch_pixels,
    side_pixels,
    vision_section,
    with_video,
)


def _idefics3(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    vision = vision_section(config)
    side = side_pixels(vision)
    size = image.section("size")
    longest = 4 * side if size is None else size.int("longest_edge", 4 * side, ge=1)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=config.int("scale_factor", 2, ge=1, le=16),
        side=side,
        longest=longest,
        tiles=(1, 256 if image.bool("do_image_splitting", True) else 1),
        resample=image.int("resample", 1, ge=0, le=5),
        max_frames=0,
    )
    return image_only("idefics3", settings, config)


def _modernvbert(files: CheckpointFiles) -> MediaSpec:
    """Idefics 3's tiles, under another name of the merged windows."""
    merge = files.config.int("pixel_shuffle_factor", 4, ge=1, le=16)
    keys = {**files.config.raw, "scale_factor": merge}
    return _idefics3(replace(files, config=ConfigReader(keys, files.config.where)))


def _smolvlm(files: CheckpointFiles) -> MediaSpec:
    """Of video too, where the files say how it is sampled."""
    spec = _idefics3(files)
    sampling = files.video.section("video_sampling") or files.image.section("video_sampling")
    mark = special_token(files.folder, "<video>")
    if sampling is None or mark is None:
        return spec
    side, size = spec.settings.side, sampling.section("video_size")
    longest = 4 * side if size is None else size.int("longest_edge", 4 * side, ge=1)
    settings = msgspec.structs.replace(
        spec.settings,
        sizes=((longest, longest),),
        max_frames=sampling.int("max_frames", 64, ge=1, le=999),
        fps=sampling.float("fps", 1.0, ge=0.01, le=1000.0),
    )
    return with_video(msgspec.structs.replace(spec, settings=settings), mark)


def _docling(files: CheckpointFiles) -> MediaSpec:
    """The coarse path: so many tokens a tile."""
    image, config = files.image, files.config
    if image.bool("fine_route", False):
        raise image.wrong("fine_route", "false")
    vision = vision_section(config)
    least = image.int("min_patches", 1, ge=1, le=256)
    most = image.int("max_patches", 32, ge=least, le=256)
    cuts = image.bool("crop_to_patches", True)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=vision.int("scale_factor", 4, ge=1, le=16),
        side=side_pixels(vision, 512),
        tiles=(least, most) if cuts else (1, 1),
        resample=image.int("resample", 3, ge=0, le=5),
        dense=(
            image.int("dense_max_patches", 0, ge=0, le=256),
            image.float("dense_max_scale", 0.0, ge=0.0),
            image.float("dense_min_aspect", 0.0, ge=0.0),
            image.float("dense_max_aspect", 0.0, ge=0.0),
        ),
    )
    return image_only("docling", settings, config)


IDEFICS_FAMILIES: Mapping[str, Callable[[CheckpointFiles], MediaSpec]] = {
    "granite_docling": _docling,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "modernvbert": _modernvbert,
}
"""By `model_type`."""
