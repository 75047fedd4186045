"""What the files of checkpoints say whose images keep their ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import CheckpointFiles
from headrace.front.media.processors.files import special_text
from headrace.front.media.processors.reading import (
    image_only,
    patch_pixels,
    pixel_bounds,
    vision_section,
)


def _gemma4(files: CheckpointFiles) -> MediaSpec:
    """The marks around an image are the tokenizer's."""
    image, config = files.image, files.config
    vision = vision_section(config)
    patch, merge = vision.int("patch_size", 16, ge=1), vision.int("pooling_kernel_size", 3, ge=1)
    tokens = image.int("max_soft_tokens", 280, ge=1, le=16_384)
    frame_tokens = files.video.int("max_soft_tokens", 70, ge=1, le=16_384)
    unit = (patch * merge) ** 2
    marks = {name: config.int(f"{name}_token_id", None, ge=0) for name in ("boi", "eoi")}
    settings = ProcessorSettings(
        patch=patch,
        merge=merge,
        image_pixels=(unit, tokens * unit),
        video_pixels=(unit, frame_tokens * unit),
        max_frames=files.video.int("num_frames", 32, ge=1, le=100_000),
        resample=image.int("resample", 3, ge=0, le=5),
        around=(special_text(files.folder, marks["boi"]), special_text(files.folder, marks["eoi"])),
    )
    spec = image_only("gemma4", settings, config)
    token = config.int("video_token_id", None, ge=0)
    return msgspec.structs.replace(spec, video_token=token)


def _gemma4_unified(files: CheckpointFiles) -> MediaSpec:
    """A window is one patch."""
    spec = _gemma4(files)
    settings = spec.settings
    side = settings.patch * settings.merge
    settings = msgspec.structs.replace(settings, patch=side, merge=1)
    return msgspec.structs.replace(spec, settings=settings)


def _glm_next(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    vision = vision_section(config)
    patch = vision.int("patch_size", 14, ge=1, le=1024)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    window = (patch * merge) ** 2
    least = image.int("min_image_tokens", 16, ge=1, le=65_536)
    most = image.int("max_image_tokens", 8000, ge=least, le=65_536)
    settings = ProcessorSettings(
        patch=patch, merge=merge, temporal=1, image_pixels=(least * window, most * window)
    )
    return image_only("glm_next", settings, config)


def _single_frames(
    name: str, files: CheckpointFiles, *, patch: int, sides: tuple[int, int]
) -> MediaSpec:
    """Images alone, in patches of one frame. `patch` and `sides` (of the squares with the fewest
    and the most pixels) hold where the files say nothing."""
    image, config = files.image, files.config
    vision = vision_section(config)
    least, most = sides
    settings = ProcessorSettings(
        patch=vision.int("patch_size", patch, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        temporal=1,
        image_pixels=pixel_bounds(image, (least * least, most * most)),
    )
    return image_only(name, settings, config)


def _paddleocr(files: CheckpointFiles) -> MediaSpec:
    return _single_frames("paddleocr", files, patch=14, sides=(384, 1536))


def _minimax(files: CheckpointFiles) -> MediaSpec:
    """Published files state a size of 672 x 672, which the reference does not follow."""
    image, config = files.image, files.config
    vision = vision_section(config)
    if isinstance(image.raw.get("size"), list):
        image = ConfigReader({**image.raw, "size": None}, image.where)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        image_pixels=pixel_bounds(image, (4 * 28 * 28, 451_584)),
        around=("]<]start of image[>[", "]<]end of image[>["),
    )
    return image_only("qwen_vl", settings, config)


def _kimi_vl(files: CheckpointFiles) -> MediaSpec:
    """In the upper left of whole windows of black."""
    image, config = files.image, files.config
    vision = vision_section(config)
    if not image.bool("pad_input", True):
        raise image.wrong("pad_input", "true")
    patch = vision.int("patch_size", 14, ge=1, le=1024)
    settings = ProcessorSettings(
        patch=patch,
        merge=int(vision.list("merge_kernel_size", [2, 2], of=int, length=2)[0]),
        image_pixels=(patch**2, image.int("in_token_limit", 4096, ge=1, le=65_536) * patch**2),
        longest=511,
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("kimi", settings, config)


def _hunyuan(files: CheckpointFiles) -> MediaSpec:
    """The filter is bicubic, whatever the files say, as in the reference."""
    return _single_frames("hunyuan", files, patch=16, sides=(512, 2048))


def _idefics2(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    size = image.section("size") or ConfigReader({}, image.where)
    queries = config.section("perceiver_config") or ConfigReader({}, config.where)
    shortest = size.int("shortest_edge", 378, ge=1, le=16_384)
    settings = ProcessorSettings(
        patch=patch_pixels(vision_section(config)),
        merge=1,
        shortest=shortest,
        longest=size.int("longest_edge", 980, ge=shortest, le=16_384),
        tiles=(1, 5 if image.bool("do_image_splitting", False) else 1),
        rows_each=queries.int("resampler_n_latents", 64, ge=1, le=4096),
        resample=image.int("resample", 2, ge=0, le=5),
        marks=("<fake_token_around_image>",),
    )
    spec = image_only("idefics2", settings, config)
    return msgspec.structs.replace(spec, shares_ends=True)


def _aria(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    if image.bool("split_image", False):
        raise image.wrong("split_image", "false")
    patch = patch_pixels(vision_section(config))
    queries = config.raw.get("projector_patch_to_query_dict") or {"4900": 256}
    most = max(int(count) for count in queries)
    side = math.isqrt(most) * patch
    if image.int("max_image_size", side) != side:
        raise image.wrong("max_image_size", f"{side}, the size of {most} patches")
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        side=side,
        shortest=image.int("min_image_size", 336, ge=1, le=side),
        rows_each=int(queries[str(most)]),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("aria", settings, config)


def _ernie(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        temporal=1,
        image_pixels=pixel_bounds(image, (56 * 56, 28 * 28 * 6177)),
    )
    return image_only("qwen_vl", settings, config)


def _cosmos(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        temporal=1,
        image_pixels=pixel_bounds(image, (256 * 256, 4096 * 4096)),
    )
    return image_only("glm_v", settings, config)


def _youtu(files: CheckpointFiles) -> MediaSpec:
    """Its code allows so many patches, whatever its files say."""
    vision = vision_section(files.config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        tiles=(1, 36_864),
        resample=files.image.int("resample", 2, ge=0, le=5),
    )
    return image_only("youtu", settings, files.config)


RATIO_FAMILIES: Mapping[str, Callable[[CheckpointFiles], MediaSpec]] = {
    "youtu_vl": _youtu,
    "aria": _aria,
    "cosmos3_edge": _cosmos,
    "ernie4_5_vl_moe": _ernie,
    "idefics2": _idefics2,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "glm5_next": _glm_next,
    "hunyuan_vl": _hunyuan,
    "kimi_vl": _kimi_vl,
    "minimax_m3_vl": _minimax,
    "paddleocr_vl": _paddleocr,
}
"""By `model_type`."""
