"""Keys of LLaVA's checkpoints as its authors publish them: a text model's config with words on what
stands before it, whose tower is known by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from headrace.back.models.key_names import Keys
from headrace.base.config.hf import ConfigReader

LARGE = {
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14},
}
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip-vit-large-patch14-336": {**LARGE, "image_size": 336},
    "clip-vit-large-patch14": {**LARGE, "image_size": 224},
    "siglip-so400m-patch14-384": {
        **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304},
        **{"num_hidden_layers": 26, "num_attention_heads": 16, "patch_size": 14},
        "image_size": 384,
    },
}
"""By the last part of the name. Of SigLIP's 27 layers the last is not there."""
TEXTS: Mapping[str, tuple[str, str]] = {
    "LlavaLlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "LlavaMistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "LlavaQwenForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "LlavaStableLMForCausalLM": ("stablelm", "StableLmForCausalLM"),
}
"""What the text model is, by the name of the architecture."""


def first_llava(config: ConfigReader) -> Keys:
    """In sections, as transformers has them."""
    config.choice("mm_projector_type", ("mlp2x_gelu",))
    config.choice("mm_vision_select_feature", ("patch",), "patch")
    if config.bool("mm_use_im_start_end", False):
        raise config.wrong("mm_use_im_start_end", "false")
    name = PurePosixPath(config.str("mm_vision_tower")).name
    stated = config.section("vision_config")
    if name not in TOWERS and stated is None:
        raise config.wrong("mm_vision_tower", f"one of {', '.join(TOWERS)}")
    vision = {**TOWERS.get(name, {}), **({} if stated is None else stated.raw)}
    clip = vision.get("model_type") == "clip_vision_model"
    kind, named = TEXTS[config.list("architectures", of=str)[0]]
    taken = config.int("mm_vision_select_layer", -2, le=-1)
    return {
        "model_type": "first_llava",
        "vision_config": vision,
        "text_config": {**config.raw, "model_type": kind, "architectures": [named]},
        "vision_feature_layer": taken if clip else -1,
        "vision_feature_select_strategy": "default" if clip else "full",
        **_cuts(config, int(vision["image_size"])),
    }


def _cuts(config: ConfigReader, side: int) -> Keys:
    """Into what sizes of tiles pictures fit."""
    ratio = config.str("image_aspect_ratio", "square")
    if ratio in ("square", "pad"):
        return {"image_grid_pinpoints": None}
    if ratio != "anyres" and not re.fullmatch(r"anyres_max_\d+", ratio):
        raise config.wrong("image_aspect_ratio", "square, pad, anyres or anyres_max_ with a number")
    config.choice("mm_patch_merge_type", ("spatial_unpad",))
    points: Any = config.raw.get("image_grid_pinpoints")
    if isinstance(points, str):
        span = re.fullmatch(r"\(1x1\),\.\.\.,\(([1-9])x([1-9])\)", points.replace(" ", ""))
        if span is None:
            raise config.wrong("image_grid_pinpoints", "sizes, or (1x1),...,(NxN)")
        rows, columns = (range(1, int(one) + 1) for one in span.groups())
        points = [[side * y, side * x] for y in rows for x in columns]
    most = {} if ratio == "anyres" else {"vision_aspect_ratio": ratio}
    return {"image_grid_pinpoints": points, **most}
