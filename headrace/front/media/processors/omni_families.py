"""What the files of checkpoints that hear and see say of their sound. Without decoders, so that
launch can ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import MediaSpec, PowerMel, SoundSettings, VideoSound
from headrace.front.media.log_mel import HOP, RATE
from headrace.front.media.processors.files import (
    extractor_keys,
    special_text,
    special_token,
    written_as,
)
from headrace.front.media.processors.sound_families import (
    HALVES,
    LINES,
    LONGEST_OF_GEMMA,
    PLANES,
    audio_section,
    gemma3n_sound,
    magnitudes_of,
    normalized_mel_of,
)

SOUND_OF_MINICPM = "<|audio|>"


def _hearing_too(spec: MediaSpec, config: ConfigReader, sound: SoundSettings) -> MediaSpec:
    """A spec of images and video, for a model that hears as well."""
    token = config.int("audio_token_id", aliases=("audio_token_index",), ge=0)
    settings = msgspec.structs.replace(spec.settings, sound=sound)
    return msgspec.structs.replace(spec, settings=settings, audio_token=token)


def _marks(folder: Path, config: ConfigReader, ids: tuple[int, int]) -> tuple[str, str]:
    """Around a sound."""
    begin, end = (
        config.int(f"audio_{name}_token_id", id, ge=0)
        for name, id in zip(("start", "end"), ids, strict=True)
    )
    return special_text(folder, begin), special_text(folder, end)


def _qwen2_5_omni(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    audio = audio_section(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        most=100 * extractor_keys(folder).int("chunk_length", 300, ge=1, le=7200),
        strides=LINES,
        pool=2,
        chunk=2 * audio.int("n_window", 100, ge=1, le=1 << 16),
        in_video=VideoSound(
            per_s=config.float("position_id_per_seconds", 25.0, ge=1.0),
            chunk_s=config.float("seconds_per_chunk", 2.0, ge=0.1),
            around=_marks(folder, config, (151_647, 151_648)),
        ),
    )
    return _hearing_too(spec, config, sound)


def _qwen3_omni(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    audio = audio_section(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        strides=PLANES,
        chunk=2 * audio.int("n_window", 50, ge=1, le=1 << 16),
        in_video=VideoSound(
            per_s=config.float("position_id_per_seconds", 13.0, ge=1.0),
            around=_marks(folder, config, (151_669, 151_670)),
        ),
    )
    return _hearing_too(spec, config, sound)


def _minicpm_o(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    """Half minutes are inputs of their own, with marks around every second. The placeholder of its
    authors is that of images, so that another token stands for a sound here."""
    audio = audio_section(config)
    token = special_token(folder, SOUND_OF_MINICPM)
    if token is None:
        raise config.wrong("architectures", f"of a model whose vocabulary has {SOUND_OF_MINICPM}")
    means = 2 if str(config.raw.get("version")) == "2.6" else 5
    pool = config.int("audio_pool_step", means, ge=1, le=50)
    longest = 2 * audio.int("max_source_positions", 1500, ge=1, le=1 << 16)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 80, ge=1, le=1024),
        part=longest,
        most=longest,
        strides=LINES,
        pool=pool,
        row=50 // pool,
        breaks=2,
        around=("<|audio_start|>", "<|audio_end|>"),
    )
    settings = msgspec.structs.replace(spec.settings, sound=sound)
    written = {**spec.written, "audio": SOUND_OF_MINICPM}
    return msgspec.structs.replace(spec, settings=settings, audio_token=token, written=written)


def _phi4(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    keys, audio = extractor_keys(folder), audio_section(config)
    frame = keys.int("win_length", 400, ge=2, le=1 << 14)
    if keys.int("hop_length", HOP, ge=1) != HOP:
        raise keys.wrong("hop_length", str(HOP))
    halvings = audio.int("time_reduction", 8, ge=2, le=64).bit_length() - 1
    sound = SoundSettings(
        bands=audio.int("input_size", 80, ge=1, le=1024),
        strides=((3, 2, 1),) * halvings,
        power=PowerMel(
            frame=frame,
            transform=keys.int("n_fft", 512, ge=frame, le=1 << 15),
            low_hz=keys.float("mel_min_frequency", 0.0, ge=0.0, le=RATE / 2),
            high_hz=keys.float("mel_max_frequency", 7690.0, ge=1.0, le=RATE / 2),
            least=1.0,
            scale=32768.0,
            emphasis=keys.float("preemphasis", 0.97, ge=0.0, le=1.0),
            shape="hamming",
        ),
        seeing=False,
    )
    settings = msgspec.structs.replace(spec.settings, sound=sound)
    token = audio.int("audio_token_id", 200_011, ge=0)
    written = {**spec.written, **written_as(folder, config, audio=token)}
    return msgspec.structs.replace(spec, settings=settings, audio_token=token, written=written)


def _gemma4(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    """The marks around a sound are the tokenizer's."""
    keys = extractor_keys(folder)
    begin = config.int("boa_token_id", 256_000, aliases=("boa_token_index",), ge=0)
    end = config.int("eoa_token_index", 258_883, aliases=("eoa_token_id",), ge=0)
    sound = SoundSettings(
        bands=keys.int("feature_size", 128, ge=1, le=1024),
        most=LONGEST_OF_GEMMA,
        strides=HALVES,
        magnitudes=magnitudes_of(keys, frame_ms=20.0, band_hz=(0.0, 8000.0), least=1e-3),
        around=(special_text(folder, begin), special_text(folder, end)),
    )
    return _hearing_too(spec, config, sound)


def _gemma3n(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    return _hearing_too(spec, config, gemma3n_sound(folder, config))


def _nemotron(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    """The frame behind the last whole one is masked, but counted."""
    audio = config.required_section("audio_config", aliases=("sound_config",))
    halvings = audio.int("subsampling_factor", 8, ge=2, le=64).bit_length() - 1
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        strides=((3, 2, 1),) * halvings,
        normalized=normalized_mel_of(extractor_keys(folder), silent_frames=1),
        around=("<so_start>", "<so_end>"),
    )
    token = config.int("audio_token_id", aliases=("sound_context_token_id",), ge=0)
    settings = msgspec.structs.replace(spec.settings, sound=sound)
    return msgspec.structs.replace(spec, settings=settings, audio_token=token)


SEEING_TOO = {
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "minicpmo": _minicpm_o,
    "phi4_multimodal": _phi4,
    "nemotron_h_omni": _nemotron,
    "NemotronH_Nano_Omni_Reasoning_V3": _nemotron,
}
"""Those that hear and see: what their sound adds to the rest."""


def hears(config: Mapping[str, Any]) -> bool:
    """Whether a config of them has a tower for sound."""
    return bool(config.get("audio_config") or config.get("sound_config"))
