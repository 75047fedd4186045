"""Which processor a checkpoint takes, and what its files say of it. Without Pillow, so that launch
can ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.registry import Registry
from headrace.front.media.processing import Processor

PROCESSORS: Registry[Callable[[ProcessorSettings], Processor]] = Registry(
    "media processor",
    {"qwen_vl": "headrace.front.media.processors.qwen_vl:QwenVisionProcessor"},
)
_SPACED = ("qwen2_vl", "qwen2_5_vl")
_STAMPED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def read_media(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    """What a checkpoint's model takes beside text; None: text alone."""
    kind = config.get("model_type")
    if "vision_config" not in config or kind not in (*_SPACED, *_STAMPED):
        return None
    reader = ConfigReader(config, f"{folder}/config.json")
    image, video = _processor_files(folder)
    return MediaSpec(
        processor="qwen_vl",
        settings=_qwen_settings(image, video, reader, stamped=kind in _STAMPED),
        image_token=reader.int("image_token_id", ge=0),
        video_token=reader.int("video_token_id", ge=0),
    )


def _qwen_settings(
    image: ConfigReader, video: ConfigReader, config: ConfigReader, *, stamped: bool
) -> ProcessorSettings:
    vision = config.section("vision_config")
    assert vision is not None
    patch = vision.int("patch_size", 16 if stamped else 14, ge=1, le=1024)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    temporal = vision.int("temporal_patch_size", 2, ge=1, le=16)
    unit = (patch * merge) ** 2
    frames = (4 * unit, 32 * unit * 768) if stamped else (128 * unit, 768 * unit)
    return ProcessorSettings(
        patch=patch,
        merge=merge,
        temporal=temporal,
        image_pixels=_pixels(image, (4 * unit, 1280 * unit)),
        video_pixels=_pixels(video, frames),
        pixels_of_all_frames=stamped,
        stamped=stamped,
        fps=video.float("fps", 2.0, ge=0.01, le=1000.0),
        min_frames=video.int("min_frames", 4, ge=1, le=100_000),
        max_frames=video.int("max_frames", 768, ge=1, le=100_000),
    )


def _pixels(reader: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    """`size` as newer files have it, min_pixels and max_pixels as older ones."""
    size = reader.section("size") or reader
    least = size.int("shortest_edge", reader.int("min_pixels", default[0], ge=1), ge=1)
    most = size.int("longest_edge", reader.int("max_pixels", default[1], ge=1), ge=1)
    return least, max(least, most)


def _processor_files(folder: Path) -> tuple[ConfigReader, ConfigReader]:
    """What the files say of the image processor, and of that for video: in files of their own, or
    as sections of one."""
    whole = _read(folder, "processor_config.json")
    image = whole.section("image_processor") or _read(folder, "preprocessor_config.json")
    video = whole.section("video_processor") or _read(folder, "video_preprocessor_config.json")
    return image, video


def _read(folder: Path, name: str) -> ConfigReader:
    path = folder / name
    return ConfigReader(read_json(path) if path.is_file() else {}, str(path))
