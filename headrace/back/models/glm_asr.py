"""GLM-ASR: Llama's decoder behind Whisper's convolutions and layers whose places turn; half a
minute is read whatever a sound's length, and four positions side by side become one token (Zhipu
2025; transformers 5.23, modeling_glmasr.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.tower import AudioTowerSpec, LinePair
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    EPS,
    LINE_STRIDES,
    hearing_decoder,
    num_layers,
    parts_that_hear,
    without_key_bias,
)
from headrace.back.models.vision import ACTIVATIONS, LayerDefaults, tower_layer
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import SoundSteps

NAMES = VisionLayerNames(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    attention="self_attn",
    merged=None,
    out="o_proj",
)
DEFAULTS = LayerDefaults(width=1280, heads=20, inner=5120, eps=EPS, eps_key=None, activation="gelu")
WINDOW = 3000
"""Frames of half a minute."""
BESIDE = 4
MARGIN = 3
"""Frames behind a sound, the last of which sees nothing but silence."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GlmAsrForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    layer = tower_layer(audio, DEFAULTS, NAMES, rotary=True)
    if audio.int("num_key_value_heads", layer.heads, ge=1) != layer.heads:
        raise audio.wrong("num_key_value_heads", f"num_attention_heads ({layer.heads})")
    if layer.inner != BESIDE * layer.width:
        raise audio.wrong("intermediate_size", f"{BESIDE} positions of {layer.width} side by side")
    ropes = audio.section("rope_parameters") or audio
    share = ropes.float("partial_rotary_factor", 0.5, ge=0.0, le=1.0)
    outputs = text.int("hidden_size", ge=1)
    activation = config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    spec = AudioTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        steps=SoundSteps(strides=LINE_STRIDES, pool=BESIDE, margin=MARGIN),
        reader=LinePair(placed=False),
        layer=replace(layer, rotary_dims=int(layer.head_dim * share)),
        layers=num_layers(audio),
        projector=TwoLayers(
            width=layer.inner,
            outputs=outputs,
            inner=2 * outputs,
            activation=ACTIVATIONS[activation],
        ),
        norm="norm",
        max_frames=WINDOW + MARGIN,
        silence=WINDOW,
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        beside=BESIDE,
    )
    tower = without_key_bias(scope / "audio_tower")
    return hearing_decoder(scope, text, scope / "language_model", tower, spec)
