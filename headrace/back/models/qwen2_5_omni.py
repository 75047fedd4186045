"""The thinker of Qwen2.5-Omni, which answers in text: Qwen2.5-VL with an audio tower beside the
vision tower, which reads two seconds at a time (Xu et al. 2025, "Qwen2.5-Omni")."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.tower import AudioTower, AudioTowerSpec, LinePair, OneBiasedLayer
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.tower import VisionTower
from headrace.back.models import qwen2
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    LINE_STRIDES,
    num_layers,
    parts_that_hear,
    whisper_layer,
    without_key_bias,
)
from headrace.back.models.qwen2_vl import spaced_axes, windowed_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MAX_TIME_POSITIONS, SoundSteps

QKV = ("q", "k", "v")
THINKER = ((r"thinker\.(.*)", r"\1"),)
"""Where the thinker lies in a checkpoint that speaks too."""
SPEAKING = (
    r"(talker|token2wav|code2wav|code_predictor)\..*",
    r"audio_tower\.audio_bos_eos_token\.weight",
)
"""What makes speech of the thinker's answer."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen2_5OmniThinkerForConditionalGeneration."""
    text, vision = parts_of(config)
    _, audio = parts_that_hear(config)
    per_s = config.float("position_id_per_seconds", 25.0, ge=0.0)
    scope = replace(scope, max_positions=scope.max_positions + MAX_TIME_POSITIONS)
    rope = spaced_axes(
        scope, text, vision, positions_per_s=per_s, behind_time=True, paired_marks=True
    )
    tower = windowed_tower(vision)
    names = replace(tower.layer.names, merged=None, qkv=QKV)
    tower = replace(tower, layer=replace(tower.layer, names=names), positions_per_s=per_s)
    inside = scope / "audio_tower"
    hears = AudioTower(inside, without_key_bias(inside), _audio_tower(audio, text))
    towers = Towers(VisionTower(scope / "visual", tower, rope), hears)
    return thinking(with_media(scope, qwen2.build(scope, text), towers, renamed=THINKER))


def thinking(decoder: Decoder) -> Decoder:
    """The decoder, whose checkpoint may hold what speaks."""
    ignored = (*decoder.weights.ignored, *SPEAKING)
    decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder


def _audio_tower(audio: ConfigReader, text: ConfigReader) -> AudioTowerSpec:
    """Pieces of `n_window` positions, pairs of which are averaged."""
    layer, positions = whisper_layer(audio), audio.int("n_window", 100, ge=1)
    return AudioTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        steps=SoundSteps(strides=LINE_STRIDES, pool=2, chunk=2 * positions),
        reader=LinePair(),
        layer=layer,
        layers=num_layers(audio),
        projector=OneBiasedLayer(
            width=layer.width, outputs=text.int("hidden_size", ge=1), name="proj"
        ),
        norm="ln_post",
        pools=True,
        window=positions,
    )
