"""What the files of checkpoints say whose placeholder the tokenizer alone names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.front.media.processors.cut_families import (
    CheckpointFiles,
    deepseek_ocr,
    llava_next,
    llava_onevision,
    tile_sizes,
)
from headrace.front.media.processors.files import read_keys, special_token, written_as
from headrace.front.media.processors.reading import (
    image_only,
    pixel_bounds,
    side_pixels,
    vision_section,
    with_video,
)


def _ovis2_5(files: CheckpointFiles) -> MediaSpec | None:
    """The placeholders are the tokenizer's, messages are texts."""
    image, vision = files.image, files.config.section("vit_config")
    token, clip = (special_token(files.folder, f"<|{kind}_pad|>") for kind in ("image", "video"))
    if token is None or vision is None:
        return None
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=vision.int("hidden_stride", 2, ge=1, le=16),
        image_pixels=pixel_bounds(image, (448 * 448, 1792 * 1792)),
        resample=image.int("resample", 3, ge=0, le=5),
        extra=2,
        max_frames=files.video.int("num_frames", 32, ge=1, le=100_000),
    )
    spec = image_only("ovis2_5", settings, _with_token(files.config, token))
    spec = msgspec.structs.replace(
        spec,
        image_mark=special_token(files.folder, "<image>"),
        written={"image": "<|image_pad|>", "video": "<|video_pad|>"},
    )
    return with_video(spec, clip)


def _minicpm_queries(files: CheckpointFiles) -> MediaSpec | None:
    """As its authors publish it: the placeholder is the tokenizer's, messages are texts."""
    image, config = files.image, files.config
    token = special_token(files.folder, "<unk>")
    if token is None or "vision_config" not in config:
        return None
    numbered = config.bool("use_image_id", True) and image.bool("use_image_id", True)
    slices = image.int("max_slice_nums", 9, ge=1, le=256)
    settings = ProcessorSettings(
        patch=image.int("patch_size", 14, ge=1, le=1024),
        merge=1,
        side=image.int("scale_resolution", 448, ge=1, le=16_384),
        tiles=(1, slices if image.bool("slice_mode", True) else 1),
        rows_each=config.int("query_num", 64, ge=1, le=4096),
    )
    spec = image_only("minicpm", settings, _with_token(config, token))
    marks = ("<image_id>", "</image_id>") if numbered else None
    return msgspec.structs.replace(spec, numbered=marks, written={"image": "<unk>"})


def _phi4(files: CheckpointFiles) -> MediaSpec | None:
    """The placeholders stand in the towers' sections."""
    image, vision = files.image, vision_section(files.config)
    side = side_pixels(vision, 448)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=2,
        side=side,
        tiles=(1, image.int("dynamic_hd", 36, ge=1, le=256)),
    )
    token = vision.int("image_token_id", 200_010, ge=0)
    spec = image_only("phi4", settings, _with_token(files.config, token))
    return msgspec.structs.replace(
        spec, written=written_as(files.folder, files.config, image=token)
    )


def _phi3(files: CheckpointFiles) -> MediaSpec | None:
    """The tower is CLIP's largest, which config.json need not state; messages are texts."""
    token = special_token(files.folder, "<|image|>")
    if token is None:
        return None
    stated = files.config.section("vision_config")
    vision = ConfigReader({} if stated is None else stated.raw, files.config.where)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=2,
        side=side_pixels(vision, 336),
        tiles=(1, files.image.int("num_crops", 16, ge=1, le=256)),
    )
    spec = image_only("phi3", settings, _with_token(files.config, token))
    return msgspec.structs.replace(spec, written={"image": "<|image|>"})


def _nemotron_vl(files: CheckpointFiles) -> MediaSpec | None:
    """The numbers of tiles are those of its processor, where config.json has none."""
    config, vision = files.config, vision_section(files.config)
    mark = special_token(files.folder, "<IMG_CONTEXT>")
    token = mark if config.raw.get("img_context_token_id") is None else None
    token = config.int("img_context_token_id", token, ge=0)
    if token is None:
        return None
    keys = read_keys(files.folder, "processor_config.json")
    if not keys.bool("use_thumbnail", config.bool("use_thumbnail", True)):
        raise config.wrong("use_thumbnail", "true")
    most = keys.int("max_input_tiles", config.int("max_dynamic_patch", 6, ge=1), ge=1, le=256)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0)),
        side=side_pixels(vision),
        tiles=(1, most),
        resample=3,
    )
    spec = image_only("nemotron_tiles", settings, _with_token(config, token))
    return msgspec.structs.replace(spec, written={"image": "<IMG_CONTEXT>"})


def _nemotron_judge(files: CheckpointFiles) -> MediaSpec | None:
    """A document's one image stands before the pair's text."""
    spec = _nemotron_vl(files)
    if spec is None:
        return None
    return msgspec.structs.replace(spec, ahead=_begin(files, "bos_token"), most={"image": 1})


def _fuyu(files: CheckpointFiles) -> MediaSpec | None:
    """Its config has no part for a tower, as there is none."""
    image, config = files.image, files.config
    token = config.int("image_token_id", special_token(files.folder, "|SPEAKER|"), ge=0)
    if token is None:
        return None
    patch = config.int("patch_size", 30, ge=1, le=1024)
    size = image.section("size") or ConfigReader({}, image.where)
    height, width = (
        size.int(key, default, ge=1, le=16_384)
        for key, default in (("height", 1080), ("width", 1920))
    )
    if height % patch or width % patch:
        raise image.wrong("size", f"multiples of {patch} pixels")
    settings = ProcessorSettings(
        patch=patch,
        merge=1,
        sizes=((height, width),),
        resample=image.int("resample", 2, ge=0, le=5),
        marks=("|NEWLINE|", "<s>"),
    )
    return image_only("fuyu", settings, _with_token(config, token))


def _deepseek_vl2(files: CheckpointFiles) -> MediaSpec | None:
    """Messages are texts; of three images and more none is cut."""
    image, config, token = files.image, files.config, special_token(files.folder, "<image>")
    vision, projector = config.section("vision_config"), config.section("projector_config")
    if token is None or vision is None:
        return None
    if not image.bool("normalize", True):
        raise image.wrong("normalize", "true")
    mean = image.list("image_mean", (0.5, 0.5, 0.5), of=float, length=3)
    sizes = tile_sizes(image, config, key="candidate_resolutions", default_side=384)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 16, ge=1, le=1024),
        merge=2 if projector is None else projector.int("downsample_ratio", 2, ge=1, le=16),
        side=side_pixels(vision, 384),
        sizes=tuple((high, wide) for wide, high in sizes),
        tiles=(1, 256),
        most_cut=2,
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
    )
    spec = image_only("deepseek_vl2", settings, _with_token(config, token))
    return msgspec.structs.replace(spec, written={"image": "<image>"})


def _deepseek_ocr2(files: CheckpointFiles) -> MediaSpec | None:
    """As its authors publish it: the placeholder is the tokenizer's, messages are texts."""
    token = special_token(files.folder, "<image>")
    if token is None:
        return None
    spec = deepseek_ocr(replace(files, config=_with_token(files.config, token)))
    return msgspec.structs.replace(spec, written={"image": "<image>"})


def _molmo(files: CheckpointFiles) -> MediaSpec | None:
    """Images stand before all text, behind the token that begins prompts; of text prompts a mark
    stands for one."""
    image, token = files.image, special_token(files.folder, "<im_patch>")
    if token is None:
        return None
    vision = files.config.section("vision_backbone") or ConfigReader({}, files.config.where)
    patch = vision.int("image_patch_size", 14, ge=1, le=1024)
    side = vision.list("image_default_input_size", (336, 336), of=int, length=2)[0]
    for key, usual in (("overlap_margins", [4, 4]), ("base_image_input_size", [side, side])):
        if image.raw.get(key, usual) != usual:
            raise image.wrong(key, str(usual))
    settings = ProcessorSettings(
        patch=patch, merge=2, side=side, tiles=(1, image.int("max_crops", 12, ge=1, le=36))
    )
    return msgspec.structs.replace(
        image_only("molmo", settings, _with_token(files.config, token)),
        image_mark=special_token(files.folder, "<|image|>"),
        ahead=_begin(files, "bos_token", "eos_token"),
    )


def _cogvlm(files: CheckpointFiles) -> MediaSpec | None:
    """One square of its configuration, of one image, which stands before all text. What stands for
    it is the token that fills prompts up."""
    config, vision = files.config, vision_section(files.config)
    settings = ProcessorSettings(
        patch=vision.int("patch_size", 14, ge=1, le=1024),
        merge=2 if "num_multi_query_heads" in config else 1,
        side=side_pixels(vision),
    )
    side = settings.side // settings.patch // settings.merge
    settings = msgspec.structs.replace(settings, rows_each=side**2 + 2)
    token = config.int("pad_token_id", 0, ge=0)
    return msgspec.structs.replace(
        image_only("square", settings, _with_token(config, token)),
        ahead=(config.int("bos_token_id", 1, ge=0),),
        most={"image": 1},
    )


def _hcx_vision(files: CheckpointFiles) -> MediaSpec | None:
    """The C-Abstractor makes one row of each window."""
    image, config = files.image, files.config
    vision = vision_section(config)
    mark = special_token(files.folder, "<|dummy3|>")
    token = config.int("image_token_id", config.int("img_start_id", mark, ge=0), ge=0)
    if token is None:
        return None
    if not image.bool("pad_to_square", True):
        raise image.wrong("pad_to_square", "true")
    mean = image.list("image_mean", (0.5, 0.5, 0.5), of=float, length=3)
    patch, side = vision.int("patch_size", 14, ge=1, le=1024), side_pixels(vision, 378)
    half = round(config.int("num_queries_vis_abstractor_image", 81, ge=1) ** 0.5)
    settings = ProcessorSettings(
        patch=patch,
        merge=side // patch // half,
        side=side,
        sizes=tile_sizes(image, config, key="possible_resolutions", default_side=378),
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
        resample=image.int("resample", 3, ge=0, le=5),
    )
    return image_only("anyres_padded", settings, _with_token(config, token))


def _first_llava(files: CheckpointFiles) -> MediaSpec | None:
    """As the later layout's, with the processor of its tower. What stands for images is a word that
    prompts have no other use for, as the tokenizers know none of their own."""
    mark = _idle(files)
    if mark is None:
        return None
    config, vision = _with_token(files.config, mark[1]), vision_section(files.config)
    siglip = vision.str("model_type", "") == "siglip_vision_model"
    mean = (0.5,) * 3 if siglip else (0.48145466, 0.4578275, 0.40821073)
    image = ConfigReader({"image_mean": list(mean), **files.image.raw}, files.image.where)
    if "image_grid_pinpoints" in config:
        read = llava_onevision if "vision_aspect_ratio" in config else llava_next
        spec = read(replace(files, config=config, image=image))
    else:
        pads = config.str("image_aspect_ratio", "square") == "pad"
        settings = ProcessorSettings(
            patch=vision.int("patch_size", 14, ge=1, le=1024),
            merge=1,
            side=side_pixels(vision, 336),
            fit="pad" if pads else "stretch" if siglip else "crop",
            pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
            resample=image.int("resample", 3, ge=0, le=5),
        )
        spec = image_only("square", settings, config)
    written = {"image": mark[0]}
    if "vision_aspect_ratio" in config:  # a video's frames stand where an image would
        spec = msgspec.structs.replace(spec, video_token=mark[1])
        written["video"] = mark[0]
    return msgspec.structs.replace(spec, written=written)


def _idle(files: CheckpointFiles) -> tuple[str, int] | None:
    """The text and the id of the token for what is unknown, or of what fills prompts up."""
    stated = read_keys(files.folder, "tokenizer_config.json").raw
    for key in ("unk_token", "pad_token"):
        text = stated.get(key)
        text = text.get("content") if isinstance(text, dict) else text
        token = special_token(files.folder, text) if isinstance(text, str) else None
        if token is not None and text != stated.get("eos_token"):
            return str(text), token
    return None


def _step3(files: CheckpointFiles) -> MediaSpec | None:
    """Sizes of squares and tiles are its code's; of its numbers config.json has hardly any."""
    vision = files.config.section("vision_config")
    mark = special_token(files.folder, "<im_patch>")
    token = files.config.int("image_token_id", mark, ge=0)
    if vision is None or token is None:
        return None
    if not vision.bool("enable_patch", True):
        raise vision.wrong("enable_patch", "true")
    side, patch = side_pixels(vision, 728), vision.int("patch_size", 14, ge=1, le=1024)
    tile = round(side * 9 / 13)
    if tile % (4 * patch):
        raise vision.wrong("image_size", f"such that {4 * patch} pixels divide 9 / 13 of it")
    settings = ProcessorSettings(
        patch=patch, merge=4, side=side, sizes=((tile, tile),), longest=3024, resample=2
    )
    return image_only("step3", settings, _with_token(files.config, token))


def _begin(files: CheckpointFiles, *keys: str) -> tuple[int, ...]:
    """The token that begins prompts, by the first of these keys; none where there is none."""
    stated = read_keys(files.folder, "tokenizer_config.json").raw
    text = next((stated[key] for key in keys if stated.get(key)), None)
    text = text.get("content") if isinstance(text, dict) else text
    token = special_token(files.folder, text) if isinstance(text, str) else None
    return () if token is None else (token,)


def _with_token(config: ConfigReader, token: int) -> ConfigReader:
    return ConfigReader({**config.raw, "image_token_id": token}, config.where)


UNNAMED: Mapping[str, Callable[[CheckpointFiles], MediaSpec | None]] = {
    "fuyu": _fuyu,
    **dict.fromkeys(("minicpmv", "minicpmo"), _minicpm_queries),
    "deepseek_vl_v2": _deepseek_vl2,
    "deepseek_ocr2_published": _deepseek_ocr2,
    "cogvlm": _cogvlm,
    "hyperclovax_vlm": _hcx_vision,
    "first_llava": _first_llava,
    "step3_vl": _step3,
    "molmo": _molmo,
    "ovis2_5": _ovis2_5,
    "phi4_multimodal": _phi4,
    "phi3_v": _phi3,
    "llama_nemotron_vl": _nemotron_vl,
    "llama_nemotron_vl_rerank": _nemotron_judge,
    "ovis2_6": _ovis2_5,
    "ovis2_6_moe": _ovis2_5,
}
"""By `model_type`, of those whose config.json names no placeholder."""
