"""What the families that hear share: the sections of their configs, Whisper's layers as data, and
the decoder of another family behind a tower."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.tower import NAMES, AudioTower, AudioTowerSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.back.models.vision import ACTIVATIONS, text_decoder, with_media
from headrace.base.config.hf import ConfigReader

EPS = 1e-5
"""Of Whisper's norms; no config states it."""
UNBIASED = "k_proj"
LINE_STRIDES = ((3, 1, 1), (3, 2, 1))
"""Whisper's two convolutions."""
PLANAR_STRIDES = ((3, 2, 1),) * 3


def parts_that_hear(config: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The text's keys, and the audio tower's."""
    audio = config.required_section("audio_config")
    return ConfigReader(text_config(config.raw), f"{config.where}: text_config"), audio


def whisper_layer(audio: ConfigReader) -> VisionLayerSpec:
    """One of Whisper's encoder, under either of the names that its sizes have."""
    width = audio.int("d_model", aliases=("hidden_size",), ge=1)
    names = ("num_attention_heads",)
    heads = audio.int("encoder_attention_heads", aliases=names, ge=1)
    if width % heads:
        raise audio.wrong("encoder_attention_heads", f"a divisor of the width ({width})")
    return VisionLayerSpec(
        width=width,
        inner=audio.int("encoder_ffn_dim", aliases=("intermediate_size",), ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=ACTIVATIONS[audio.choice("activation_function", ACTIVATIONS, "gelu")],
        norm=LAYER,
        names=NAMES,
    )


def num_layers(audio: ConfigReader) -> int:
    """Of the tower."""
    return audio.int("encoder_layers", aliases=("num_hidden_layers",), ge=1)


def hearing_decoder(
    scope: Scope, text: ConfigReader, within: Scope, tower: Scope, spec: AudioTowerSpec
) -> Decoder:
    """The decoder of the text's family in `within`, behind a tower in `tower`; `scope` is that of
    the projector."""
    encoder = AudioTower(scope, tower, spec)  # the decoder's plan holds what was built before it
    return with_media(scope, text_decoder(within, text), encoder)


def without_key_bias(scope: Scope) -> Scope:
    """Where Whisper's layers lie."""
    return replace(scope, unbiased=UNBIASED)
