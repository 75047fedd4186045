"""What the files of checkpoints say whose images are cut into tiles, or whose videos into clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processing import MAX_PATCHES
from headrace.front.media.processors.files import read_keys, special_token
from headrace.front.media.processors.reading import (
    image_only,
    patch_pixels,
    pixel_bounds,
    side_pixels,
    vision_section,
    with_video,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """A checkpoint's config, and what its files say of the processors of images and of video."""

    folder: Path
    config: ConfigReader
    image: ConfigReader
    video: ConfigReader


def llava_next(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        side=side_pixels(vision, 336),
        resample=image.int("resample", 3, ge=0, le=5),
        sizes=tile_sizes(image, config),
    )
    return image_only("anyres", settings, config)


def _llava_next_video(files: CheckpointFiles) -> MediaSpec:
    """Of video the middle square of each frame."""
    spec, config = llava_next(files), files.config
    most = files.video.int("num_frames", 32, ge=1, le=100_000)
    settings = msgspec.structs.replace(spec.settings, fit="crop", max_frames=most)
    token = config.int("video_token_id", None, aliases=("video_token_index",), ge=0)
    return msgspec.structs.replace(
        spec, processor="anyres_frames", settings=settings, video_token=token
    )


def llava_onevision(files: CheckpointFiles) -> MediaSpec:
    image, config, video = files.image, files.config, files.video
    vision = vision_section(config)
    patch, side = vision.int("patch_size", 14, ge=1, le=1024), side_pixels(vision, 384)
    ratio = config.str("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")
    if not ratio.isdecimal() or not int(ratio):
        raise config.wrong("vision_aspect_ratio", "anyres_max_ with a number")
    mean = image.list("image_mean", [0.48145466, 0.4578275, 0.40821073], of=float)
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        side=side,
        fit="pad",
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
        resample=image.int("resample", 3, ge=0, le=5),
        sizes=tile_sizes(image, config),
        most_windows=int(ratio) * (side // patch) ** 2,
        most_cut=1,
        tiles=(1, 256),
        max_frames=video.int("num_frames", 32, ge=1, le=100_000),
    )
    spec = image_only("anyres", settings, config)
    token = config.int("video_token_id", None, aliases=("video_token_index",), ge=0)
    return msgspec.structs.replace(spec, video_token=token)


def tile_sizes(
    image: ConfigReader,
    config: ConfigReader,
    *,
    key: str = "image_grid_pinpoints",
    default_side: int = 336,
) -> tuple[tuple[int, int], ...]:
    """Pairs of pixels that pictures are fitted into, whole squares all of them."""
    side = side_pixels(vision_section(config), default_side)
    stated = image.raw.get(key) or config.raw.get(key)
    if not isinstance(stated, list) or not stated:
        raise config.wrong(key, "a list of heights and widths in pixels")
    sizes = list[tuple[int, int]]()
    for one in stated:
        if (
            not isinstance(one, list)
            or len(one) != 2
            or any(not isinstance(each, int) or each < 1 or each % side for each in one)
        ):
            raise config.wrong(key, f"pairs of multiples of {side} pixels")
        sizes.append((one[0], one[1]))
    return tuple(sizes)


def _llama4(files: CheckpointFiles) -> MediaSpec:
    """Marks in the prompt stand for whole images, which have them too."""
    image, config = files.image, files.config
    if image.bool("resize_to_max_canvas", False):
        raise image.wrong("resize_to_max_canvas", "false")
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=round(1 / vision.float("pixel_shuffle_ratio", 0.5, ge=0.01, le=1.0)),
        side=side_pixels(vision, 448),
        tiles=(1, image.int("max_patches", 16, ge=1, le=256)),
        resample=image.int("resample", 2, ge=0, le=5),
    )
    spec = image_only("llama4", settings, config)
    return msgspec.structs.replace(spec, image_mark=special_token(files.folder, "<|image|>"))


def _kimi(files: CheckpointFiles) -> MediaSpec:
    """Published files state bounds as `media_proc_cfg`, in patches."""
    image, config, video = files.image, files.config, files.video
    mark = special_token(files.folder, "<|kimi_k25_video_placeholder|>")
    vision = vision_section(config)
    stated = image.section("media_proc_cfg") or image
    size = image.section("size")
    longest = 512 if size is None else size.int("max_height", 512, ge=1)
    patch = vision.int("patch_size", 14, ge=1, le=1024)
    most = stated.int("max_patches", 16_384, aliases=("in_patch_limit",), ge=1)
    clip = video.int("max_patches", 4096, ge=1)
    settings = ProcessorSettings(
        patch=patch,
        merge=int(vision.list("merge_kernel_size", [2, 2], of=int, length=2)[0]),
        temporal=vision.int("pos_emb_time", 4, aliases=("init_pos_emb_time",), ge=1),
        image_pixels=(patch**2, most * patch**2),
        video_pixels=(
            patch**2,
            stated.int("in_patch_limit_each_frame", clip, ge=1) * patch**2,
        ),
        longest=stated.int("patch_limit_on_one_side", longest, ge=1),
        resample=image.int("resample", 3, ge=0, le=5),
        fps=video.float("fps", stated.float("sample_fps", 2.0, ge=0.01, le=1000.0), ge=0.01),
    )
    spec = image_only("kimi", settings, config)
    return with_video(spec, config.int("video_token_id", mark, ge=0))


def _ovis2(files: CheckpointFiles) -> MediaSpec:
    image, vision = files.image, vision_section(files.config)
    if not image.bool("use_covering_area_grid", True):
        raise image.wrong("use_covering_area_grid", "true")
    cuts = image.bool("crop_to_patches", False)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=vision.int("hidden_stride", 1, ge=1, le=16),
        side=side_pixels(vision, 224),
        tiles=(1, image.int("max_patches", 12, ge=1, le=256) if cuts else 1),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    spec = image_only("ovis2", settings, files.config)
    return msgspec.structs.replace(spec, image_mark=special_token(files.folder, "<image>"))


def _step(files: CheckpointFiles) -> MediaSpec:
    image, vision = files.image, vision_section(files.config)
    size = image.section("size")
    tile = image.int("patch_size", 504, ge=1, le=16_384)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=4,
        side=728 if size is None else size.int("height", 728, ge=1, le=16_384),
        sizes=((tile, tile),),
        longest=image.int("max_image_size", 3024, ge=1, le=65_536),
        resample=image.int("resample", 2, ge=0, le=5),
    )
    return image_only("step", settings, files.config)


def _aya(files: CheckpointFiles) -> MediaSpec:
    """The prompt's mark is a token of its own."""
    spec = image_only("aya", _canvas_settings(files, side=364), files.config)
    return msgspec.structs.replace(spec, image_mark=special_token(files.folder, "<image>"))


def _command(files: CheckpointFiles) -> MediaSpec:
    keys = read_keys(files.folder, "tokenizer_config.json")
    names = (("boi_token", "<|START_OF_IMG|>"), ("img_line_break_token", "<|IMG_LINE_BREAK|>"))
    named = keys.section("extra_special_tokens") or keys
    marks = [named.str(key, default) for key, default in (*names, ("eoi_token", "<|END_OF_IMG|>"))]
    settings = _canvas_settings(files, side=512)
    settings = msgspec.structs.replace(settings, marks=tuple(marks))
    return image_only("command", settings, files.config)


def _canvas_settings(files: CheckpointFiles, *, side: int) -> ProcessorSettings:
    image, vision = files.image, vision_section(files.config)
    most = image.int("max_patches", 12, ge=1, le=256)
    cuts = image.bool("crop_to_patches", True)
    return ProcessorSettings(
        patch=patch_pixels(vision),
        merge=files.config.int("downsample_factor", 2, ge=1, le=16),
        side=side_pixels(vision, side),
        tiles=(image.int("min_patches", 1, ge=1), most) if cuts else (1, 1),
        resample=image.int("resample", 3, ge=0, le=5),
    )


def _qianfan(files: CheckpointFiles) -> MediaSpec:
    """InternVL's tiles; the prompt's mark is a token of its own."""
    image, config = files.image, files.config
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0)),
        side=side_pixels(vision, 448),
        tiles=(image.int("min_patches", 1, ge=1), image.int("max_patches", 12, ge=1, le=256)),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    spec = image_only("tiled", settings, config)
    return msgspec.structs.replace(spec, image_mark=special_token(files.folder, "<image>"))


def _minicpm(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    mode = "4x" if config.str("model_type") == "minicpm_ocr" else "16x"
    mode = config.choice("downsample_mode", ("4x", "16x"), mode)
    image.choice("downsample_mode", (mode,), mode)
    image.choice("small_image_upsize", ("always",), "always")
    numbered = ("<image_id>", "</image_id>") if image.bool("use_image_id", True) else None
    slices = image.int("max_slice_nums", 9, ge=1, le=256)
    settings = ProcessorSettings(
        patch=image.int("patch_size", 14, ge=1, le=1024),
        merge=2 ** ((mode == "16x") + config.int("merger_times", 1, ge=1, le=4)),
        side=image.int("scale_resolution", 448, ge=1, le=16_384),
        tiles=(1, slices if image.bool("slice_mode", True) else 1),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return msgspec.structs.replace(image_only("minicpm", settings, config), numbered=numbered)


def deepseek_ocr(files: CheckpointFiles) -> MediaSpec:
    """Of a window of 4 x 4 patches a query remains."""
    image, vision = files.image, vision_section(files.config)
    sam = vision.section("sam_config")
    size = image.section("size")
    side = 1024 if size is None else size.int("height", 1024, ge=1, le=16_384)
    tile = image.int("tile_size", 768, ge=1, le=16_384)
    bounds = image.int("min_patches", 2, ge=1), image.int("max_patches", 6, ge=1, le=256)
    settings = ProcessorSettings(
        patch=16 if sam is None else sam.int("patch_size", 16, ge=1, le=1024),
        merge=4,
        side=side,
        sizes=((tile, tile),),
        tiles=bounds if image.bool("crop_to_patches", True) else (1, 1),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("deepseek_ocr", settings, files.config)


def _nemotron(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    settings = ProcessorSettings(
        patch=image.int("patch_size", 16, ge=1, le=1024),
        merge=2,
        tiles=(
            image.int("min_num_patches", 1024, ge=1, le=MAX_PATCHES),
            image.int("max_num_patches", 13_312, ge=0, le=MAX_PATCHES) or MAX_PATCHES,
        ),
        resample=image.int("resample", 3, ge=0, le=5),
        around=("<img>", "</img>"),
    )
    spec = image_only("radio", settings, config)
    return msgspec.structs.replace(spec, image_mark=special_token(files.folder, "<image>"))


def _lfm2(files: CheckpointFiles) -> MediaSpec:
    image, config = files.image, files.config
    if abs(image.float("max_pixels_tolerance", 2.0) - 2.0) > 1e-6:
        raise image.wrong("max_pixels_tolerance", "2.0")
    patch = image.int("encoder_patch_size", 16, ge=1, le=1024)
    merge = config.int("downsample_factor", 2, ge=1, le=16)
    pixels = (patch * merge) ** 2
    splits = image.bool("do_image_splitting", True)
    bounds = image.int("min_tiles", 2, ge=1), image.int("max_tiles", 10, ge=1, le=256)
    settings = ProcessorSettings(
        patch=patch,
        merge=merge,
        side=image.int("tile_size", 512, ge=1, le=16_384),
        image_pixels=(
            image.int("min_image_tokens", 64, ge=1, le=65_536) * pixels,
            image.int("max_image_tokens", 256, ge=1, le=65_536) * pixels,
        ),
        tiles=bounds if splits else (1, 1),
        marks=("<|img_thumbnail|>",) if image.bool("use_thumbnail", True) else (),
        resample=image.int("resample", 2, ge=0, le=5),
    )
    return image_only("lfm2", settings, config)


def _video_llama(files: CheckpointFiles) -> MediaSpec:
    image, vision = files.image, vision_section(files.config)
    if image.int("merge_size", 1) != 1:
        raise image.wrong("merge_size", "1")
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        temporal=1,
        image_pixels=pixel_bounds(image, (56 * 56, 28 * 28 * 1280)),
    )
    return image_only("qwen_vl", settings, files.config)


CUT_FAMILIES: Mapping[str, Callable[[CheckpointFiles], MediaSpec]] = {
    "llava_next": llava_next,
    "llava_next_video": _llava_next_video,
    "llava_onevision": llava_onevision,
    "llama4": _llama4,
    "kimi_k25": _kimi,
    "ovis2": _ovis2,
    **{"step3p7": _step, "step_robotics": _step},
    "aya_vision": _aya,
    "cohere2_vision": _command,
    "qianfan_ocr": _qianfan,
    "minicpmv4_6": _minicpm,
    "minicpm_ocr": _minicpm,
    "deepseek_ocr2": deepseek_ocr,
    "video_llama_3": _video_llama,
    "lfm2_vl": _lfm2,
    "nemotron_h_omni": _nemotron,
    "NemotronH_Nano_Omni_Reasoning_V3": _nemotron,
}
"""By `model_type`."""
