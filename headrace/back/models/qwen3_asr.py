"""Qwen3-ASR: Qwen 3's decoder behind the audio tower of Qwen3-Omni, which reads a second at a time
and attends within windows of eight (Xu et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.tower import AudioTowerSpec, PlanarStack
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    PLANAR_STRIDES,
    hearing_decoder,
    num_layers,
    parts_that_hear,
    whisper_layer,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import SoundSteps, length_after

TEXT = "model.language_model"
RENAMED = (
    (r"thinker\.model\.(.*)", TEXT + r".\1"),
    (r"thinker\.lm_head\.(.*)", r"lm_head.\1"),
    (r"thinker\.audio_tower\.proj([12])\.(.*)", r"model.multi_modal_projector.linear_\1.\2"),
    (r"thinker\.audio_tower\.(.*)", r"model.audio_tower.\1"),
)
"""How the checkpoints of the model's authors name its tensors."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3ASRForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    inside = replace(scope, base_within=TEXT)
    spec = qwen3_audio_tower(audio, outputs=audio.int("output_dim", 3584, ge=1))
    decoder = hearing_decoder(scope / "model", text, inside, scope / "model.audio_tower", spec)
    decoder.weights = replace(decoder.weights, renamed=(*decoder.weights.renamed, *RENAMED))
    return decoder


def qwen3_audio_tower(audio: ConfigReader, *, outputs: int) -> AudioTowerSpec:
    """The tower, which Qwen3-Omni has too."""
    layer, half = whisper_layer(audio), audio.int("n_window", 50, ge=1)
    chunk = 2 * half
    seen = audio.int("n_window_infer", 8 * chunk, ge=chunk)
    return AudioTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        steps=SoundSteps(strides=PLANAR_STRIDES, chunk=chunk),
        reader=PlanarStack(channels=audio.int("downsample_hidden_size", 480, ge=1)),
        layer=layer,
        layers=num_layers(audio),
        projector=TwoLayers(
            width=layer.width, inner=layer.width, outputs=outputs, activation=layer.activation
        ),
        norm="ln_post",
        window=length_after(chunk, PLANAR_STRIDES) * (seen // chunk),
    )
