"""Which processor a checkpoint takes, and what its files say of it. Without Pillow, so that launch
can ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.config.two_towers import is_clip, is_two_towers
from headrace.base.registry import Registry
from headrace.front.media.processing import Processor
from headrace.front.media.processors.cut_families import CUT_FAMILIES, CheckpointFiles
from headrace.front.media.processors.encoder_decoders import ENCODER_DECODERS
from headrace.front.media.processors.files import (
    first_special,
    read_keys,
    special_token,
)
from headrace.front.media.processors.idefics_families import IDEFICS_FAMILIES
from headrace.front.media.processors.omni_families import SEEING_TOO, hears
from headrace.front.media.processors.ratio_families import RATIO_FAMILIES
from headrace.front.media.processors.reading import (
    image_norm,
    image_only,
    patch_pixels,
    pixel_bounds,
    side_pixels,
    vision_section,
    with_video,
)
from headrace.front.media.processors.sound_families import HEARING
from headrace.front.media.processors.square_families import SQUARE_FAMILIES
from headrace.front.media.processors.unnamed_families import UNNAMED

PROCESSORS: Registry[Callable[[ProcessorSettings], Processor]] = Registry(
    "media processor",
    {
        "qwen_vl": "headrace.front.media.processors.qwen_vl:QwenVisionProcessor",
        "glm_v": "headrace.front.media.processors.glm_v:GlmVisionProcessor",
        "glm_next": "headrace.front.media.processors.glm_next:GlmNextProcessor",
        "glm_46v": "headrace.front.media.processors.glm_v:Glm46VisionProcessor",
        "gemma4": "headrace.front.media.processors.gemma4:Gemma4Processor",
        "anyres": "headrace.front.media.processors.anyres:AnyResolutionProcessor",
        "anyres_frames": "headrace.front.media.processors.anyres:AveragedFramesProcessor",
        "anyres_padded": "headrace.front.media.processors.anyres:PaddedProcessor",
        "cropped_frames": "headrace.front.media.processors.anyres:CroppedFramesProcessor",
        "hunyuan": "headrace.front.media.processors.hunyuan:HunyuanProcessor",
        "kimi": "headrace.front.media.processors.kimi:KimiProcessor",
        "llama4": "headrace.front.media.processors.llama4:Llama4Processor",
        "ovis2": "headrace.front.media.processors.ovis2:Ovis2Processor",
        "ovis2_5": "headrace.front.media.processors.ovis2_5:Ovis25Processor",
        "step3": "headrace.front.media.processors.step:Step3Processor",
        "step": "headrace.front.media.processors.step:StepProcessor",
        "paddleocr": "headrace.front.media.processors.paddleocr:PaddleOcrProcessor",
        "aya": "headrace.front.media.processors.canvas:AyaProcessor",
        "command": "headrace.front.media.processors.canvas:CommandProcessor",
        "minicpm": "headrace.front.media.processors.minicpm:MiniCpmProcessor",
        "deepseek_ocr": "headrace.front.media.processors.deepseek_ocr:DeepseekOcrProcessor",
        "deepseek_vl2": "headrace.front.media.processors.deepseek_vl2:DeepseekVl2Processor",
        "molmo": "headrace.front.media.processors.molmo:MolmoProcessor",
        "radio": "headrace.front.media.processors.radio:RadioProcessor",
        "youtu": "headrace.front.media.processors.youtu:YoutuProcessor",
        "lfm2": "headrace.front.media.processors.lfm2:Lfm2Processor",
        "siglip2": "headrace.front.media.processors.siglip2:Siglip2Processor",
        "square": "headrace.front.media.processors.square:SquareProcessor",
        "two_squares": "headrace.front.media.processors.square:TwoSquaresProcessor",
        "nemotron_tiles": "headrace.front.media.processors.square:CoveringTilesProcessor",
        "tiled": "headrace.front.media.processors.square:TiledProcessor",
        "idefics2": "headrace.front.media.processors.shrunk:Idefics2Processor",
        "aria": "headrace.front.media.processors.shrunk:AriaProcessor",
        "phi3": "headrace.front.media.processors.phi3:Phi3Processor",
        "phi4": "headrace.front.media.processors.phi4:Phi4Processor",
        "donut": "headrace.front.media.processors.donut:DonutProcessor",
        "nougat": "headrace.front.media.processors.donut:NougatProcessor",
        "docling": "headrace.front.media.processors.docling:DoclingProcessor",
        "fuyu": "headrace.front.media.processors.shrunk:FuyuProcessor",
        "pixtral": "headrace.front.media.processors.pixtral:PixtralProcessor",
        "lighton": "headrace.front.media.processors.pixtral:UnbrokenProcessor",
        "idefics3": "headrace.front.media.processors.idefics3:Idefics3Processor",
    },
)
_SPACED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    *("exaone4_5", "hyperclovax_vision_v2"),
)
_APART = {**UNNAMED, **ENCODER_DECODERS}
"""Whose placeholder config.json does not name, or not beside the tower."""
_READERS = {**CUT_FAMILIES, **SQUARE_FAMILIES, **RATIO_FAMILIES, **IDEFICS_FAMILIES}
_STAMPED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "lfm3_vl"), ()),
    **dict.fromkeys(("intern_s2_preview", "interns1_pro"), ()),
    "cohere_compass": ("<|VISION_START|>", "<|VISION_END|>"),
}
"""Whose frames stand behind their times, and the marks around them where they are not Qwen's."""


def read_media(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    """What a checkpoint's model takes beside text; None: text alone."""
    spec = _read(folder, config)
    if spec is None or spec.image_token is None:
        return spec
    image, _ = _processor_files(folder, config)
    return msgspec.structs.replace(spec, norm=image_norm(image))


def _read(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    kind, reader = config.get("model_type"), ConfigReader(config, f"{folder}/config.json")
    if kind in HEARING:
        return HEARING[kind](folder, reader)
    spec = _read_seeing(folder, config)
    if spec is None or kind not in SEEING_TOO or not hears(config):
        return spec
    return SEEING_TOO[kind](folder, reader, spec)


def _read_seeing(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    """The same without its sound."""
    kind = config.get("model_type")
    if is_two_towers(config):
        return _two_towers(folder, config)
    if kind in ("internvl_chat", "skywork_chat"):
        return _internvl_chat(folder, config)
    if kind in _APART:
        reader = ConfigReader(config, f"{folder}/config.json")
        image, video = _processor_files(folder, config)
        return _APART[str(kind)](
            CheckpointFiles(folder=folder, config=reader, image=image, video=video)
        )
    named = (
        *("image_token_id", "image_token_index", "media_placeholder_token_id"),
        "img_context_token_id",
    )
    if "vision_config" not in config or not any(config.get(key) is not None for key in named):
        return None
    reader = ConfigReader(config, f"{folder}/config.json")
    image, video = _processor_files(folder, config)
    if kind in _STILL:
        return _STILL[kind](image, reader)
    if kind in _READERS:
        files = CheckpointFiles(folder=folder, config=reader, image=image, video=video)
        return _READERS[str(kind)](files)
    if kind in _MOVING:
        return _MOVING[kind](image, reader, video)
    if kind in ("internvl", "interns1"):
        return _internvl(image, reader, video, special_token(folder, "<video>"))
    if kind not in (*_SPACED, *_STAMPED):
        return None
    return MediaSpec(
        processor="qwen_vl",
        settings=_qwen_settings(image, video, reader, stamped=kind in _STAMPED),
        image_token=reader.int("image_token_id", aliases=("image_token_index",), ge=0),
        video_token=reader.int("video_token_id", None, aliases=("video_token_index",), ge=0),
    )


def _qwen_settings(
    image: ConfigReader, video: ConfigReader, config: ConfigReader, *, stamped: bool
) -> ProcessorSettings:
    vision = vision_section(config)
    patch = vision.int("patch_size", 16 if stamped else 14, ge=1, le=1024)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    temporal = vision.int("temporal_patch_size", 2, ge=1, le=16)
    unit = (patch * merge) ** 2
    frames = (4 * unit, 32 * unit * 768) if stamped else (128 * unit, 768 * unit)
    return ProcessorSettings(
        patch=patch,
        merge=merge,
        temporal=temporal,
        image_pixels=pixel_bounds(image, (4 * unit, 1280 * unit)),
        video_pixels=pixel_bounds(video, frames),
        pixels_of_all_frames=stamped,
        stamped=stamped,
        marks=_STAMPED.get(config.str("model_type", ""), ()),
        fps=video.float("fps", 2.0, ge=0.01, le=1000.0),
        min_frames=video.int("min_frames", 4, ge=1, le=100_000),
        max_frames=video.int("max_frames", 768, ge=1, le=100_000),
    )


def _processor_files(folder: Path, config: Mapping[str, Any]) -> tuple[ConfigReader, ConfigReader]:
    """What the files say of the image processor, and of that for video: in files of their own, or
    as sections of one, or of the first among that one's own keys; of GGUF files, in the config."""
    whole = read_keys(folder, "processor_config.json")
    if folder.suffix == ".gguf":
        whole = ConfigReader(config, str(folder))
    own = whole if "image_mean" in whole else read_keys(folder, "preprocessor_config.json")
    image = whole.section("image_processor") or own
    video = whole.section("video_processor") or read_keys(folder, "video_preprocessor_config.json")
    return image, video


def _llava(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    """One square, or Pixtral's images."""
    vision = vision_section(config)
    if vision.str("model_type", "") == "pixtral":
        return _pixtral(image, config)
    side = side_pixels(vision)
    pads = image.bool("do_pad", False)
    mean = image.list("image_mean", [0.48145466, 0.4578275, 0.40821073], of=float)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        side=side,
        fit="pad" if pads else _fit_of(image),
        resample=image.int("resample", 3, ge=0, le=5),
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
    )
    return image_only("square", settings, config)


def _fit_of(image: ConfigReader) -> str:
    """Of CLIP's processor: the middle of a picture whose shorter side fits, or all of it."""
    size = image.raw.get("size")
    squeezed = isinstance(size, Mapping) and size.get("height") is not None
    return "crop" if image.bool("do_center_crop", True) and not squeezed else "stretch"


def _two_towers(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    """An image is a prompt of one token, of which the tokenizer has none: its first special one."""
    mark = first_special(folder)
    if mark is None:
        return None
    reader = ConfigReader({**config, "image_token_id": mark[0]}, f"{folder}/config.json")
    image, _ = _processor_files(folder, config)
    vision = vision_section(reader)
    patch = vision.int("patch_size", 16, ge=1, le=1024)
    if vision.raw.get("image_size") is None:
        settings = ProcessorSettings(
            patch=patch,
            merge=1,
            tiles=(1, image.int("max_num_patches", 256, ge=1, le=65_536)),
            resample=image.int("resample", 2, ge=0, le=5),
            rows_each=1,
        )
        return image_only("siglip2", settings, reader)
    clip = is_clip(config)
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        side=side_pixels(vision),
        fit=_fit_of(image) if clip else "stretch",
        resample=image.int("resample", 3, ge=0, le=5),
        rows_each=1,
    )
    return image_only("square", settings, reader)


def _pixtral(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    vision = vision_section(config)
    size = image.section("size")
    longest = None if size is None else size.int("longest_edge", None, ge=1)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=config.int("spatial_merge_size", 1, ge=1, le=16),
        longest=longest or side_pixels(vision, 1024),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("pixtral", settings, config)


def _lighton(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    """Without breaks; windows are of two patches a side unless the config says otherwise."""
    spec = _pixtral(image, ConfigReader({"spatial_merge_size": 2, **config.raw}, config.where))
    return msgspec.structs.replace(spec, processor="lighton")


def _internvl(
    image: ConfigReader, config: ConfigReader, video: ConfigReader, mark: int | None
) -> MediaSpec:
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=patch_pixels(vision),
        merge=round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0)),
        side=side_pixels(vision),
        tiles=(image.int("min_patches", 1, ge=1), image.int("max_patches", 12, ge=1, le=256)),
        resample=image.int("resample", 3, ge=0, le=5),
        max_frames=video.int("num_frames", 32, ge=1, le=100_000),
    )
    return with_video(image_only("tiled", settings, config), mark)


def _internvl_chat(folder: Path, config: Mapping[str, Any]) -> MediaSpec | None:
    """As its authors publish it: the placeholder is the tokenizer's, the tiling config.json's."""
    token = special_token(folder, "<IMG_CONTEXT>")
    if token is None:
        return None
    reader = ConfigReader({**config, "image_token_id": token}, f"{folder}/config.json")
    tiles = {
        "min_patches": reader.int("min_dynamic_patch", 1, ge=1),
        "max_patches": reader.int("max_dynamic_patch", 12, ge=1)
        if reader.bool("dynamic_image_size", True)
        else 1,
    }
    none = ConfigReader({}, reader.where)
    mark = special_token(folder, "<video>")
    return _internvl(ConfigReader(tiles, reader.where), reader, none, mark)


def _paligemma(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    """The text's begin token stands behind the image."""
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        side=side_pixels(vision),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("square", settings, config)


def _glm(image: ConfigReader, config: ConfigReader, video: ConfigReader) -> MediaSpec:
    vision = vision_section(config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
        temporal=vision.int("temporal_patch_size", 2, ge=1, le=16),
        image_pixels=pixel_bounds(image, (112 * 112, 28 * 28 * 15000)),
        video_pixels=pixel_bounds(video, (112 * 112, 28 * 28 * 2 * 30000)),
        fps=video.float("fps", 2.0, ge=0.01, le=1000.0),
        max_duration_s=video.int("max_duration", 300, ge=1),
    )
    newer = config.str("model_type") in ("glm46v", "glm_ocr")
    spec = image_only("glm_46v" if newer else "glm_v", settings, config)
    mark = config.int("video_token_id", None, ge=0)
    return with_video(spec, mark)


def _pangu(image: ConfigReader, config: ConfigReader) -> MediaSpec:
    """As Qwen2.5-VL's."""
    settings = _qwen_settings(image, ConfigReader({}, config.where), config, stamped=False)
    return image_only("qwen_vl", settings, config)


_STILL = {
    "openpangu_vl": _pangu,
    "llava": _llava,
    "vipllava": _llava,
    "mistral3": _pixtral,
    "mistral_large4": _pixtral,
    "lighton_ocr": _lighton,
    "paligemma": _paligemma,
}
"""Those that take images alone."""
_MOVING = {
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glm46v": _glm,
    "glm_ocr": _glm,
}
"""Those that take video too."""
