"""What encoder-decoders read of a sound of any length, and how their decoder is asked. Without
decoders, so that launch can ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import SoundSettings, Waveform
from headrace.base.config.speech import MOONSHINE, MOONSHINE_STREAMING
from headrace.front.media.log_mel import HOP, RATE
from headrace.front.media.processors.files import extractor_keys
from headrace.front.media.processors.sound_families import (
    kaldi_mel,
    normalized_mel_of,
    seamless_sound,
)

LONGEST_S = 30
"""Of a window."""


class SpeechInput(msgspec.Struct, frozen=True, kw_only=True):
    """`sound`: how frames are made, of which its encoder reads `most`; `prompt`: a row of
    front/text/speech_prompts.py, "": the decoder begins with its start tokens alone."""

    sound: SoundSettings
    prompt: str = ""


def _moonshine(folder: Path, config: ConfigReader) -> SpeechInput:
    streams = config.raw.get("model_type") == "moonshine_streaming"
    values, frames, *numbers = MOONSHINE_STREAMING if streams else MOONSHINE
    strides = tuple(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    waveform = Waveform(normal=False)
    sound = SoundSettings(bands=values, most=frames, strides=strides, waveform=waveform)
    return SpeechInput(sound=sound)


def _conformer(folder: Path, config: ConfigReader) -> SoundSettings:
    """NeMo's spectrogram before a FastConformer."""
    encoder = config.section("encoder_config") or ConfigReader({}, config.where)
    halvings = encoder.int("subsampling_factor", 8, ge=2, le=64).bit_length() - 1
    return SoundSettings(
        bands=encoder.int("num_mel_bins", 128, ge=1, le=1024),
        most=LONGEST_S * RATE // HOP,
        strides=((3, 2, 1),) * halvings,
        normalized=normalized_mel_of(extractor_keys(folder)),
    )


def _canary(folder: Path, config: ConfigReader) -> SpeechInput:
    return SpeechInput(sound=_conformer(folder, config), prompt="context")


def _cohere(folder: Path, config: ConfigReader) -> SpeechInput:
    return SpeechInput(sound=_conformer(folder, config), prompt="piece_context")


def _speech_to_text(folder: Path, config: ConfigReader) -> SpeechInput:
    keys = extractor_keys(folder)
    normal = "whole" if keys.bool("do_ceptral_normalize", True) else ""
    for key in ("normalize_means", "normalize_vars"):
        if normal and not keys.bool(key, True):
            raise keys.wrong(key, "true")
    taps = config.list("conv_kernel_sizes", (5, 5), of=int) or ()
    sound = SoundSettings(
        bands=config.int("input_feat_per_channel", 80, ge=1, le=1024),
        most=LONGEST_S * RATE // HOP,
        strides=tuple((one, 2, one // 2) for one in taps),
        power=kaldi_mel(normal=normal),
    )
    return SpeechInput(sound=sound)


def _seamless(folder: Path, config: ConfigReader) -> SpeechInput:
    """A position for each row of frames, and for each `adaptor_stride` of those."""
    seen, step = (config.int(f"adaptor_{key}", 8, ge=1, le=64) for key in ("kernel_size", "stride"))
    layers = config.int("num_adapter_layers", 1, ge=0, le=8)
    bands = config.int("feature_projection_input_dim", 160, ge=1, le=4096)
    sound = seamless_sound(
        extractor_keys(folder),
        bands,
        most=LONGEST_S * RATE // HOP,
        strides=((seen, step, step // 2),) * layers,
    )
    return SpeechInput(sound=sound, prompt="target")


_READERS: Mapping[str, Callable[[Path, ConfigReader], SpeechInput]] = {
    **dict.fromkeys(("moonshine", "moonshine_streaming"), _moonshine),
    "canary": _canary,
    "cohere_asr": _cohere,
    "speech_to_text": _speech_to_text,
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _seamless),
}


def read_speech(folder: Path, config: ConfigReader) -> SpeechInput | None:
    """Of a checkpoint's model; None: its encoder reads no sounds of any length."""
    reader = _READERS.get(str(config.raw.get("model_type")))
    names = config.raw.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    reads_text = named.endswith("ForTextToText")  # SeamlessM4T's other half
    return None if reader is None or reads_text else reader(folder, config)
