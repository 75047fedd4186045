"""What the files of checkpoints that hear say of their sound. Without decoders, so that launch can
ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.kimi_audio import TRANSCRIBE, blank_of
from headrace.base.config.media import (
    MagnitudeSettings,
    MediaSpec,
    NormalizedMel,
    PowerMel,
    ProcessorSettings,
    SoundClock,
    SoundSettings,
    SpeechInTime,
    Waveform,
)
from headrace.front.media.log_mel import HOP, RATE
from headrace.front.media.paired_mel import TOKEN, WINDOW
from headrace.front.media.processors.files import (
    extractor_keys,
    read_keys,
    special_text,
    special_token,
)

STACKED = 2
"""Frames of Granite Speech's rows."""
LINES = ((3, 1, 1), (3, 2, 1))
PLANES = ((3, 2, 1),) * 3
HALVES = ((3, 2, 1),) * 2
STREAMING = ("nemotron_asr_streaming", "nemotron3_5_asr")
"""Conformers whose convolutions look back alone."""
STREAMING_PAD = "[STREAMING_PAD]"
LONGEST_WORD = 10
"""Pieces of sound."""
LONGEST_OF_GEMMA = 3000
"""Frames: half a minute."""


def _audio_only(config: ConfigReader, sound: SoundSettings) -> MediaSpec:
    token = config.int("audio_token_id", aliases=("audio_token_index",), ge=0)
    return MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=token,
    )


def audio_section(config: ConfigReader) -> ConfigReader:
    """The audio tower's keys."""
    return config.required_section("audio_config")


def _qwen2_audio(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = audio_section(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        most=2 * audio.int("max_source_positions", 1500, ge=1, le=1 << 16),
        strides=LINES,
        pool=2,
        margin=2,
    )
    return _audio_only(config, sound)


def _glm_asr(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = audio_section(config)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        most=2 * audio.int("max_position_embeddings", 1500, ge=1, le=1 << 16),
        strides=LINES,
        pool=4,
        margin=3,
    )
    return _audio_only(config, sound)


def _voxtral(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = audio_section(config)
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


def _voxtral_realtime(folder: Path, config: ConfigReader) -> MediaSpec:
    """The silence around a sound is that of the reference's tokenizer (mistral-common): behind it
    what the text lags, a token, and the longest word there may be. Any token stands for a piece."""
    audio, text = audio_section(config), config.section("text_config") or config
    beside = config.int("downsample_factor", 4, ge=1, le=64)
    delay = config.int("default_num_delay_tokens", 6, ge=0, le=1024)
    stated = read_keys(folder, "tekken.json").section("audio") or ConfigReader({}, "tekken.json")
    width = text.int("vocab_size", ge=1)
    pad = special_token(folder, STREAMING_PAD)
    if pad is None:
        raise config.wrong("architectures", f"that of a model whose vocabulary has {STREAMING_PAD}")
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        strides=((2, 2, 0),),
        pool=beside,
        loudest=extractor_keys(folder).float("global_log_mel_max", 1.5),
        in_time=SpeechInTime(
            piece=2 * beside,
            lead=stated.int("streaming_n_left_pad_tokens", 32, ge=0, le=1024),
            tail=delay + 1 + LONGEST_WORD,
            delay=delay,
            first=text.int("bos_token_id", 1, ge=0, le=width - 1),
            pad=pad,
        ),
    )
    return MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=pad,
        transcribes=True,
    )


def _qwen3_asr(folder: Path, config: ConfigReader) -> MediaSpec:
    audio = audio_section(config)
    least = extractor_keys(folder).int("min_length", 8000, ge=0, le=1 << 24)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 128, ge=1, le=1024),
        least=-(-least // 160),
        strides=PLANES,
        chunk=2 * audio.int("n_window", 50, ge=1, le=1 << 16),
    )
    return msgspec.structs.replace(_audio_only(config, sound), transcribes=True)


def _kimi_audio(folder: Path, config: ConfigReader) -> MediaSpec:
    positions = audio_section(config).int("max_source_positions", 1500, ge=1, le=1 << 16)
    if 2 * positions != WINDOW:
        raise config.wrong("audio_config.max_source_positions", f"{WINDOW // 2}")
    sound = SoundSettings(
        bands=audio_section(config).int("num_mel_bins", 128, ge=1, le=1024),
        pool=TOKEN,
        chunk=WINDOW + TOKEN,
        margin=TOKEN,
        windowed="paired",
    )
    return MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=blank_of(config),
        transcribes=True,
        asks=TRANSCRIBE,
    )


def _moss(folder: Path, config: ConfigReader) -> MediaSpec:
    audio, keys = audio_section(config), read_keys(folder, "processor_config.json")
    beside = config.int("audio_merge_size", 4, ge=1)
    positions = audio.int("max_source_positions", 1500, ge=1, le=1 << 16)
    if beside != TOKEN // 2 or 2 * positions != WINDOW:
        raise config.wrong("audio_merge_size", f"{TOKEN // 2}, of {WINDOW // 2} positions")
    every = keys.int("time_marker_every_seconds", 2, ge=0, le=3600)
    per_s = keys.float("audio_tokens_per_second", 12.5, ge=0.1, le=100.0)
    sound = SoundSettings(
        bands=audio.int("num_mel_bins", 80, ge=1, le=1024),
        pool=TOKEN,
        chunk=WINDOW + TOKEN,
        margin=TOKEN,
        windowed="heard",
        clock=SoundClock(per_s=per_s, every_s=every) if every else None,
    )
    spec = _audio_only(config, sound)
    return msgspec.structs.replace(spec, transcribes=True, speakers=True)


def _granite_speech(folder: Path, config: ConfigReader) -> MediaSpec:
    encoder = config.section("encoder_config")
    inputs = 160 if encoder is None else encoder.int("input_dim", 160, ge=2, le=4096)
    window = config.int("window_size", 15, ge=1, le=1 << 16)
    sound = SoundSettings(
        bands=inputs // STACKED,
        stack=STACKED,
        chunk=window,
        per_chunk=window // config.int("downsample_rate", 5, ge=1, le=window),
    )
    return _audio_only(config, sound)


def gemma3n_sound(folder: Path, config: ConfigReader) -> SoundSettings:
    """Every sound has as many tokens as the longest, and the one that ends it, which the tower has;
    the mark before it is the tokenizer's."""
    keys = extractor_keys(folder)
    begin = config.int("boa_token_id", 256_000, ge=0)
    magnitudes = magnitudes_of(
        ConfigReader({"preemphasis": 0.97, "fft_overdrive": True, **keys.raw}, keys.where),
        frame_ms=32.0,
        band_hz=(125.0, 7600.0),
        least=1e-5,
    )
    return SoundSettings(
        bands=keys.int("feature_size", 128, ge=1, le=1024),
        most=LONGEST_OF_GEMMA,
        chunk=LONGEST_OF_GEMMA,
        per_chunk=config.int("audio_soft_tokens_per_image", 188, ge=1, le=16_384) + 1,
        magnitudes=msgspec.structs.replace(magnitudes, adds_least=False, lead=0, multiple=128),
        around=("\n\n" + special_text(folder, begin), "\n\n"),
    )


def normalized_mel_of(keys: ConfigReader, *, silent_frames: int = 0) -> NormalizedMel:
    """Of Parakeet's extractor."""
    frame = keys.int("win_length", 400, ge=2, le=1 << 14)
    if keys.int("hop_length", 160, ge=1) != HOP:
        raise keys.wrong("hop_length", str(HOP))
    return NormalizedMel(
        frame=frame,
        transform=keys.int("n_fft", 512, ge=frame, le=1 << 15),
        emphasis=keys.float("preemphasis", 0.97, ge=0.0, le=1.0),
        silent_frames=silent_frames,
    )


def _ctc(folder: Path, config: ConfigReader, sound: SoundSettings) -> MediaSpec:
    """Any id stands for a frame; the blank is the padding's."""
    blank = config.int("pad_token_id", 0, ge=0, le=config.int("vocab_size", 32, ge=1) - 1)
    return MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=blank,
        transcribes=True,
        blank=blank,
    )


def _parakeet_ctc(folder: Path, config: ConfigReader) -> MediaSpec:
    encoder = config.required_section("encoder_config")
    halvings = encoder.int("subsampling_factor", 8, ge=2, le=64).bit_length() - 1
    kind, normalized = config.str("model_type"), normalized_mel_of(extractor_keys(folder))
    streams = kind in STREAMING
    sound = SoundSettings(
        bands=encoder.int("num_mel_bins", 80, ge=1, le=1024),
        strides=((2, 2, 1) if streams else (3, 2, 1),) * halvings,
        normalized=msgspec.structs.replace(normalized, plain=streams),
    )
    spec = _ctc(folder, config, sound)
    emits = streams or kind in ("parakeet_rnnt", "parakeet_tdt")
    return msgspec.structs.replace(spec, emits=emits)


def _lasr(folder: Path, config: ConfigReader) -> MediaSpec:
    encoder, keys = config.required_section("encoder_config"), extractor_keys(folder)
    if keys.int("hop_length", HOP, ge=1) != HOP:
        raise keys.wrong("hop_length", str(HOP))
    seen = encoder.int("subsampling_conv_kernel_size", 5, ge=1, le=64)
    step = encoder.int("subsampling_conv_stride", 2, ge=1, le=64)
    frame = keys.int("win_length", 400, ge=2, le=1 << 14)
    sound = SoundSettings(
        bands=encoder.int("num_mel_bins", 128, ge=1, le=1024),
        strides=((seen, step, 0),) * 2,
        power=PowerMel(frame=frame, transform=keys.int("n_fft", 512, ge=frame, le=1 << 15)),
    )
    return _ctc(folder, config, sound)


def _wave_ctc(folder: Path, config: ConfigReader) -> MediaSpec:
    keys = extractor_keys(folder)
    if keys.int("sampling_rate", RATE, ge=1) != RATE:
        raise keys.wrong("sampling_rate", str(RATE))
    kernels = config.list("conv_kernel", (10, 3, 3, 3, 3, 2, 2), of=int) or ()
    steps = config.list("conv_stride", (5, 2, 2, 2, 2, 2, 2), of=int) or ()
    sound = SoundSettings(
        bands=1,
        strides=tuple((kernel, step, 0) for kernel, step in zip(kernels, steps, strict=False)),
        waveform=Waveform(normal=keys.bool("do_normalize", True)),
    )
    return _ctc(folder, config, sound)


def kaldi_mel(**more: Any) -> PowerMel:
    """As Kaldi makes its filter banks, over samples of 16 bits."""
    settings: dict[str, Any] = {
        **{"low_hz": 20.0, "high_hz": RATE / 2, "least": 1.192092955078125e-07},
        **{"scale": 32768.0, "centered": True, "emphasis": 0.97, "shape": "povey"},
    }
    return PowerMel(**{**settings, **more})


def seamless_sound(keys: ConfigReader, bands: int, **more: Any) -> SoundSettings:
    """Of SeamlessM4T's extractor; `bands`: of a row, which holds `stride` frames."""
    stack = keys.int("stride", 2, ge=1, le=64)
    if bands % stack:
        raise keys.wrong("stride", f"a divisor of {bands}")
    return SoundSettings(bands=bands, stack=stack, power=kaldi_mel(normal="sample"), **more)


def _wave_bert(folder: Path, config: ConfigReader) -> MediaSpec:
    bands = config.int("feature_projection_input_dim", 160, ge=1, le=4096)
    return _ctc(folder, config, seamless_sound(extractor_keys(folder), bands))


def _granite5(folder: Path, config: ConfigReader) -> MediaSpec:
    """Frames with their changes, two of them side by side."""
    encoder = config.required_section("encoder_config")
    halving = encoder.list("subsample_layers", (0, 1), of=int) or ()
    sound = SoundSettings(
        bands=encoder.int("num_mel_bins", 80, ge=1, le=1024),
        stack=STACKED,
        changes=True,
        strides=((2, 2, 0),) * len(halving),
    )
    return _ctc(folder, config, sound)


def magnitudes_of(
    keys: ConfigReader, *, frame_ms: float, band_hz: tuple[float, float], least: float
) -> MagnitudeSettings:
    """Of Gemma's extractors."""
    frame = round(16 * keys.float("frame_length_ms", frame_ms, ge=1.0, le=1000.0))
    transform = 1 << (frame - 1).bit_length()
    return MagnitudeSettings(
        frame=frame,
        transform=2 * transform if keys.bool("fft_overdrive", False) else transform,
        low_hz=keys.float("min_frequency", band_hz[0], ge=0.0),
        high_hz=keys.float("max_frequency", band_hz[1], ge=1.0),
        emphasis=keys.float("preemphasis", 0.0, ge=0.0, le=1.0),
        least=keys.float("mel_floor", least, ge=1e-30),
        adds_least=True,
        lead=frame // 2,
    )


HEARING = {
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "voxtral_realtime": _voxtral_realtime,
    "qwen3_asr": _qwen3_asr,
    "kimi_audio": _kimi_audio,
    "moss_transcribe_diarize": _moss,
    "granite_speech": _granite_speech,
    "granite_speech_plus": _granite_speech,
    "audioflamingo3": _qwen2_audio,
    "glmasr": _glm_asr,
    **dict.fromkeys(("parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"), _parakeet_ctc),
    **dict.fromkeys(STREAMING, _parakeet_ctc),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm"), _wave_ctc),
    **dict.fromkeys(("data2vec-audio", "sew", "wav2vec2-conformer"), _wave_ctc),
    "wav2vec2-bert": _wave_bert,
    "granite_speech5_ctc": _granite5,
    "lasr_ctc": _lasr,
}
"""Those that hear and do not see."""
