"""Mistral Large 4 as it sees: Mistral 3's tower and projection, in Mistral's own names, before its
decoder. Checkpoints store the tower's queries and keys for pairs of neighbouring dimensions."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models import mistral_large4
from headrace.back.models.blocks import Decoder
from headrace.back.models.llava import pixtral_tower, read_projector, taken_layers
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader

NAMES = VisionLayerNames(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    attention="self_attn",
    merged=None,
    qkv=("q_proj", "wk", "wv"),
    out="o_proj",
    mlp=("gate_proj", "up_proj", "down_proj"),
)
"""As the decoder's rules leave them (mistral_large4.py, RENAMED)."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MistralLarge4ForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_encoder", _tower(config, text, vision))
    inside = replace(scope, base_within=mistral_large4.BASE)
    decoder = with_media(scope, mistral_large4.build(inside, text), tower)
    ignored = tuple(one for one in decoder.weights.ignored if one != mistral_large4.VISION)
    decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    projector = read_projector(config, text, vision.int("hidden_size", 2048, ge=1))
    assert projector.norm is not None
    projector = replace(
        projector,
        module="",
        names=("vision_language_adapter.w_in", "vision_language_adapter.w_out"),
        norm=("pre_mm_projector_norm", *projector.norm[1:]),
    )
    (layers,) = taken_layers(config, vision)
    spec = pixtral_tower(vision, projector, layers)
    return replace(spec, layer=replace(spec.layer, rotary_layout="pairs", names=NAMES))
