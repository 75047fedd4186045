"""Qwen2-Audio: Qwen2's decoder behind Whisper's encoder, whose positions are averaged by two, and
one linear layer (Chu et al. 2024)."""

from __future__ import annotations

from headrace.back.layers.audio.tower import AudioTowerSpec, LinePair, OneBiasedLayer
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    LINE_STRIDES,
    hearing_decoder,
    num_layers,
    parts_that_hear,
    whisper_layer,
    without_key_bias,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import SoundSteps

MARGIN = 2
"""Frames behind a sound that its last positions see: those of the silence that fills 30 s."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen2AudioForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    layer, positions = whisper_layer(audio), audio.int("max_source_positions", 1500, ge=1)
    spec = AudioTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        steps=SoundSteps(strides=LINE_STRIDES, pool=2, margin=MARGIN),
        reader=LinePair(table=positions),
        layer=layer,
        layers=num_layers(audio),
        projector=OneBiasedLayer(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            name="linear",
            module="multi_modal_projector",
        ),
        norm="layer_norm",
        pools=True,
        max_frames=2 * positions + MARGIN,
    )
    tower = without_key_bias(scope / "audio_tower")
    return hearing_decoder(scope, text, scope / "language_model", tower, spec)
