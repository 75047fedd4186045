"""Florence-2 (Xiao et al. 2023; transformers 5.23, modeling_florence2.py): BART, whose encoder
reads what DaViT makes of an image before the text."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.davit import DavitSpec, DavitStage, DavitTower
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.models.bart import BartForm, bart_spec, learned
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.vision import ACTIVATIONS, IMAGENET_MEAN, IMAGENET_STD, seeing
from headrace.base.config.hf import ConfigReader

FORM = BartForm(pre=False, logits_bias=False, prefix="model.language_model")
IGNORED = (
    r"model\.language_model\.(encoder|decoder)\.embed_tokens\.weight",
    r"lm_head\.weight",
    r"model\.language_model\.final_logits_bias",
)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """Florence2ForConditionalGeneration."""
    text, vision = config.required_section("text_config"), config.required_section("vision_config")
    spec = bart_spec(scope, text, FORM, positions=learned(text))
    tower = _tower(vision)
    if tower.outputs != spec.sizes.width:
        raise vision.wrong("projection_dim", f"d_model of the text ({spec.sizes.width})")
    media = seeing(scope, DavitTower(scope / "model", tower))
    return EncoderDecoder(scope, replace(spec, media=media, ignored=IGNORED))


def _tower(vision: ConfigReader) -> DavitSpec:
    widths = vision.list("embed_dim", [128, 256, 512, 1024], of=int)
    ratio = vision.float("mlp_ratio", 4.0, ge=0.1)

    def numbers(key: str, default: list[int]) -> list[int]:
        return list(vision.list(key, default, of=int, length=len(widths)))

    depths, kernels = numbers("depths", [1, 1, 9, 1]), numbers("patch_size", [7, 3, 3, 3])
    strides, paddings = (
        numbers("patch_stride", [4, 2, 2, 2]),
        numbers("patch_padding", [3, 1, 1, 1]),
    )
    heads, groups = numbers("num_heads", [4, 8, 16, 32]), numbers("num_groups", [4, 8, 16, 32])
    firsts = vision.list("patch_prenorm", [False, True, True, True], of=bool, length=len(widths))
    for width, parts, key in [
        *zip(widths, heads, ["num_heads"] * len(widths), strict=True),
        *zip(widths, groups, ["num_groups"] * len(widths), strict=True),
    ]:
        if parts < 1 or width % parts:
            raise vision.wrong(key, f"divisors of embed_dim ({widths})")
    stages = tuple(
        DavitStage(
            width=widths[i],
            inner=int(widths[i] * ratio),
            depth=depths[i],
            heads=heads[i],
            groups=groups[i],
            kernel=kernels[i],
            stride=strides[i],
            padding=paddings[i],
            norm_first=firsts[i],
        )
        for i in range(len(widths))
    )
    side = math.prod(strides)
    return DavitSpec(
        stages=stages,
        window=vision.int("window_size", 12, ge=1),
        activation=ACTIVATIONS[vision.choice("activation_function", ACTIVATIONS, "gelu")],
        bias=vision.bool("qkv_bias", True),
        patches=PatchSpec(patch=side, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        table=vision.int("max_position_embeddings", 50, ge=1, le=256),
        moments=vision.int("max_temporal_embeddings", 100, ge=1),
        outputs=vision.int("projection_dim", 1024, ge=1),
    )
