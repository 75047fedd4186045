"""What the files of checkpoints that hear say of their sound. Without decoders, so that launch can
ask."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.media import MediaSpec, ProcessorSettings, SoundSettings

LINES = ((3, 1, 1), (3, 2, 1))
PLANES = ((3, 2, 1),) * 3


def _extractor(folder: Path) -> ConfigReader:
    """The keys of the feature extractor: in a file of its own, or a section of the processor's."""
    for name, section in (
        ("processor_config.json", "feature_extractor"),
        ("preprocessor_config.json", None),
    ):
        path = folder / name
        if not path.is_file():
            continue
        reader: ConfigReader | None = ConfigReader(read_json(path), str(path))
        assert reader is not None
        reader = reader.section(section) if section else reader
        if reader is not None:
            return reader
    return ConfigReader({}, str(folder))


def _audio_only(config: ConfigReader, sound: SoundSettings) -> MediaSpec:
    token = config.int("audio_token_id", aliases=("audio_token_index",), ge=0)
    return MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=token,
    )


def _audio(config: ConfigReader) -> ConfigReader:
    audio = config.section("audio_config")
    if audio is None:
        raise config.wrong("audio_config", "the audio tower's section")
    return audio


def _qwen2_audio(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = _audio(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        most=2 * audio.int("max_source_positions", 1500, ge=1, le=1 << 16),
        strides=LINES,
        pool=2,
        margin=2,
    )
    return _audio_only(config, sound)


def _voxtral(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = _audio(config)
    positions = audio.int("max_source_positions", 1500, ge=1, le=1 << 16)
    width, inner = audio.int("hidden_size", ge=1), audio.int("intermediate_size", ge=1)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        window=2 * positions,
        strides=LINES,
        chunk=2 * positions,
        per_chunk=positions * width // inner,
    )
    return _audio_only(config, sound)


def _qwen3_asr(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = _audio(config)
    least = _extractor(folder).int("min_length", 8000, ge=0, le=1 << 24)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        least=-(-least // 160),
        strides=PLANES,
        chunk=2 * audio.int("n_window", 50, ge=1, le=1 << 16),
    )
    return msgspec.structs.replace(_audio_only(config, sound), transcribes=True)


def _hearing_too(spec: MediaSpec, config: ConfigReader, sound: SoundSettings) -> MediaSpec:
    """A spec of images and video, for a model that hears as well."""
    token = config.int("audio_token_id", aliases=("audio_token_index",), ge=0)
    settings = msgspec.structs.replace(spec.settings, sound=sound)
    return msgspec.structs.replace(spec, settings=settings, audio_token=token)


def _qwen2_5_omni(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    audio = _audio(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        most=100 * _extractor(folder).int("chunk_length", 300, ge=1, le=7200),
        strides=LINES,
        pool=2,
        chunk=2 * audio.int("n_window", 100, ge=1, le=1 << 16),
    )
    return _hearing_too(spec, config, sound)


def _qwen3_omni(folder: Path, config: ConfigReader, spec: MediaSpec) -> MediaSpec:
    audio = _audio(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        strides=PLANES,
        chunk=2 * audio.int("n_window", 50, ge=1, le=1 << 16),
    )
    return _hearing_too(spec, config, sound)


HEARING = {"qwen2_audio": _qwen2_audio, "voxtral": _voxtral, "qwen3_asr": _qwen3_asr}
"""Those that hear and do not see."""
SEEING_TOO = {"qwen2_5_omni_thinker": _qwen2_5_omni, "qwen3_omni_moe_thinker": _qwen3_omni}
"""Those that hear and see: what their sound adds to the rest."""
