"""LLaVA 1.5 and 1.6 and LLaVA-OneVision as their authors publish them: all that llava.py has, under
the names of a text model that holds the rest (Liu et al. 2023, 2024; Li et al. 2024). The tower
must be among the tensors."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.llava import still_tower
from headrace.back.models.vision import parts_of, text_decoder, with_media
from headrace.base.config.hf import ConfigReader

PROJECTED = "multi_modal_projector.linear_"
RENAMED = (
    (r"^model\.mm_projector\.0\.", f"{PROJECTED}1."),
    (r"^model\.mm_projector\.2\.", f"{PROJECTED}2."),
    (r"^model\.image_newline$", "image_newline"),
    (r"^model\.vision_tower\.vision_tower\.(vision_model\.)?", "vision_tower."),
)
UNREAD = (
    r"vision_tower\.(encoder\.layers\.\d+|post_layernorm|head)\..*",
    r"vision_tower\..*\.position_ids",
)
"""Behind the layer whose outputs are taken, and what is counted."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LlavaLlamaForCausalLM, LlavaMistralForCausalLM, LlavaQwenForCausalLM,
    LlavaStableLMForCausalLM."""
    text, vision = parts_of(config)
    vision.choice("model_type", ("clip_vision_model", "siglip_vision_model"))
    tower = PlainTower(scope, scope / "vision_tower", still_tower(config, text, vision))
    decoder = with_media(scope, text_decoder(scope, text), tower, renamed=RENAMED)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder
