"""Audio Flamingo 3: Qwen 2's decoder behind Whisper's encoder, whose positions are averaged by two,
and two linear layers (Goel et al. 2025)."""

from __future__ import annotations

from headrace.back.layers.audio.tower import AudioTowerSpec, LinePair
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    LINE_STRIDES,
    hearing_decoder,
    num_layers,
    parts_that_hear,
    whisper_layer,
    without_key_bias,
)
from headrace.back.models.qwen2_audio import MARGIN
from headrace.back.models.vision import ACTIVATIONS
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import SoundSteps


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AudioFlamingo3ForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    layer, positions = whisper_layer(audio), audio.int("max_source_positions", 1500, ge=1)
    activation = config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    spec = AudioTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        steps=SoundSteps(strides=LINE_STRIDES, pool=2, margin=MARGIN),
        reader=LinePair(table=positions),
        layer=layer,
        layers=num_layers(audio),
        projector=TwoLayers(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            bias=config.bool("projector_bias", True),
            activation=ACTIVATIONS[activation],
        ),
        norm="layer_norm",
        pools=True,
        max_frames=2 * positions + MARGIN,
    )
    tower = without_key_bias(scope / "audio_tower")
    return hearing_decoder(scope, text, scope / "language_model", tower, spec)
