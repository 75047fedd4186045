"""HyperCLOVA X SEED Vision: Llama's or HyperCLOVA X's decoder behind SigLIP's tower and the
C-Abstractor; the whole picture, then its tiles put together again, a learned row behind each row
of windows (NAVER 2025; names and keys of the published checkpoints; images)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.abstractor import AbstractorSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    parts_of,
    siglip_layer,
    siglip_tower,
    square,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Packing

RENAMED = ((r"vision_model\.vision_model\.(.*)", r"vision_model.\1"),)
UNREAD = (r"vision_model\.(encoder\.layers\.\d+|post_layernorm|head)\..*",)
"""Behind the layer whose outputs are taken."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HCXVisionForCausalLM."""
    config.choice("mm_projector_type", ("cabstractor",), "cabstractor")
    for key, only in (("anyres", True), ("unpad", True), ("proj_prenorm", False)):
        if config.bool(key, only) != only:
            raise config.wrong(key, str(only).lower())
    text, vision = parts_of(config)
    vision.choice("model_type", ("siglip_vision_model",))
    tower = PlainTower(scope, scope / "vision_model", _tower(config, text, vision))
    inside = text_decoder(scope / "language_model", text)
    decoder = with_media(scope, inside, tower, renamed=RENAMED)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    _, side = square(vision)
    queries = config.int("num_queries_vis_abstractor_image", 81, ge=1)
    half = round(queries**0.5)
    if half**2 != queries or side % half:
        wanted = f"the square of a divisor of {side} patches a side"
        raise config.wrong("num_queries_vis_abstractor_image", wanted)
    layer = siglip_layer(vision, default_width=1152, default_heads=16)
    projector = AbstractorSpec(
        width=layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=side // half,
        side=side,
        positions=config.bool("proj_pos_emb", True),
        module="mm_projector",
    )
    spec = siglip_tower(vision, projector, layer)
    taken = config.int("use_nth_layer", -1, ge=-spec.layers, le=-1)
    return replace(
        spec,
        layers=spec.layers + 1 + taken,
        behind=None,
        frames=True,
        packings={"image": Packing(newline=True, middle=True)},
        learned=("image_newline",),
    )
