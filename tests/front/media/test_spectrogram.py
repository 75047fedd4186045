"""Frames and token counts of sounds equal those of transformers' processors, from 0.1 to 35 s (MOD-03)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.audio_utils import mel_filter_bank
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.granite_speech.feature_extraction_granite_speech import (
    GraniteSpeechFeatureExtractor,
)
from transformers.models.lasr.feature_extraction_lasr import LasrFeatureExtractor
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3Processor,
)
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASREncoder

from headrace.base.config.hf import ConfigReader
from headrace.base.errors import InvalidRequest
from headrace.front.media.log_mel import RATE
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.media.processors.speech_families import read_speech
from tests.front.media.test_log_mel import sound

BANDS = 128
SECONDS = (0.1, 1.0, 7.777, 29.99, 30.0)
BOUND = 1e-4
"""Theirs is made by torch in float32; ours, in float64, is within 2e-5 of it."""


def spec_of(folder: Path, kind: str, **audio: Any) -> Any:
    config = {
        "model_type": kind,
        "audio_token_id": 7,
        "audio_config": {"num_mel_bins": BANDS, **audio},
    }
    spec = read_media(folder, config)
    assert spec is not None and spec.audio_token == 7 and spec.image_token is None
    return spec.settings


def frames_of(medium: Any) -> tuple[np.ndarray, int]:
    (one,) = medium.inputs
    return one.rows.view(np.float32), one.num_tokens


@pytest.mark.parametrize("seconds", SECONDS)
def test_qwen2_audio(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=BANDS)
    theirs = extractor(
        samples / 32768.0, sampling_rate=RATE, padding="max_length", return_attention_mask=True
    )
    length = int(theirs["attention_mask"].sum())
    ours, num_tokens = frames_of(spectrogram(samples, spec_of(tmp_path, "qwen2_audio")))
    assert num_tokens == ((length - 1) // 2 + 1 - 2) // 2 + 1
    seen = min(length + 2, 3000)
    assert ours.shape == (length + 2, BANDS)
    assert np.abs(ours[:seen] - theirs["input_features"][0].T[:seen]).max() < BOUND
    assert not ours[seen:].any()


@pytest.mark.parametrize("seconds", [0.1, 7.777, 35.0])
def test_the_omni_thinkers(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    more = {"vision_config": {}, "image_token_id": 5}
    extractor = transformers.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=40)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"chunk_length": 40}))
    for kind, padding in (("qwen2_5_omni", "max_length"), ("qwen3_omni_moe", "longest")):
        theirs = extractor(
            samples / 32768.0,
            sampling_rate=RATE,
            padding=padding,
            truncation=False,
            return_attention_mask=True,
        )
        length = int(theirs["attention_mask"].sum())
        config = {
            **{"model_type": f"{kind}_thinker", "audio_token_id": 7, **more},
            "audio_config": {"num_mel_bins": BANDS},
        }
        spec = read_media(tmp_path, config)
        assert spec is not None and (spec.audio_token, spec.image_token) == (7, 5)
        ours, num_tokens = frames_of(spectrogram(samples, spec.settings))
        assert ours.shape == (length, BANDS)
        assert np.abs(ours - theirs["input_features"][0].T[:length]).max() < BOUND
        module = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
        assert num_tokens == module._get_feat_extract_output_lengths(torch.tensor(length))


@pytest.mark.parametrize("seconds", [0.02, 0.1, 7.777, 30.0])
def test_gemma4(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    theirs = Gemma4AudioFeatureExtractor()([samples / 32768.0])
    frames, mask = theirs["input_features"][0], theirs["input_features_mask"][0]
    config = {
        **{"model_type": "gemma4", "vision_config": {}, "image_token_id": 5, "audio_token_id": 7},
        **{"audio_config": {"hidden_size": 1024}, "boa_token_id": 8, "eoa_token_index": 9},
    }
    marks = [{"id": 8, "content": "<|audio>"}, {"id": 9, "content": "<audio|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": marks}))
    spec = read_media(tmp_path, config)
    assert spec is not None and (spec.audio_token, spec.image_token) == (7, 5)
    heard = spectrogram(samples, spec.settings)
    ours, num_tokens = frames_of(heard)
    assert heard.layout == ("<|audio>", 0, "<audio|>")
    assert len(ours) == mask.sum()
    assert np.abs(ours - frames[mask]).max() < BOUND
    assert num_tokens == len(mask[::2][::2][mask[::2][::2]])


def test_a_sound_of_one_sample_is_too_short_for_any(tmp_path: Path) -> None:
    for kind in ("qwen2_audio", "qwen3_asr"):
        settings = spec_of(tmp_path, kind)
        if settings.sound.least == 0:
            with pytest.raises(InvalidRequest, match="is too short"):
                spectrogram(np.ones(1, np.int16), settings)
    granite = read_media(tmp_path, {"model_type": "granite_speech", "audio_token_index": 7})
    assert granite is not None
    with pytest.raises(InvalidRequest, match="is too short"):
        spectrogram(np.ones(1, np.int16), granite.settings)


@pytest.mark.parametrize("seconds", [0.1, 7.777, 35.0])
def test_granite_speech(tmp_path: Path, seconds: float) -> None:
    """The extractor of the reference is torchaudio's: its spectrogram by torch, its bands by transformers."""
    samples = sound(seconds)
    wave = torch.from_numpy(samples / 32768.0)
    window = torch.hann_window(400, dtype=torch.float64)
    power = torch.stft(wave, 512, 160, 400, window, return_complex=True).abs() ** 2
    bands = mel_filter_bank(257, 80, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    log = (power.T @ torch.from_numpy(bands)).clip(min=1e-10).log10()
    log = torch.maximum(log, log.max() - 8.0) / 4 + 1
    frames = log[: len(log) // 2 * 2].reshape(-1, 160)
    extractor = GraniteSpeechFeatureExtractor.__new__(GraniteSpeechFeatureExtractor)
    extractor.melspec_kwargs = {"hop_length": 160}
    extractor.projector_window_size, extractor.projector_downsample_rate = 15, 5
    spec = read_media(tmp_path, {"model_type": "granite_speech", "audio_token_index": 7})
    assert spec is not None and spec.audio_token == 7
    ours, num_tokens = frames_of(spectrogram(samples, spec.settings))
    assert ours.shape == frames.shape and np.abs(ours - frames.numpy()).max() < BOUND
    assert [num_tokens] == extractor._get_num_audio_features([len(samples)])


def test_what_a_window_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"sound of 30\.1 s given; this model hears 30 s"):
        spectrogram(sound(30.1), spec_of(tmp_path, "qwen2_audio"))
    with pytest.raises(InvalidRequest, match=r"sound of 0\.006 s is too short"):
        spectrogram(sound(0.006), spec_of(tmp_path, "qwen2_audio"))


@pytest.mark.parametrize("seconds", [0.1, 30.0, 35.0])
def test_voxtral(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=BANDS)
    how: dict[str, Any] = {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
    theirs = extractor(samples / 32768.0, sampling_rate=RATE, **how)["input_features"][0]
    settings = spec_of(tmp_path, "voxtral", hidden_size=1280, intermediate_size=5120)
    ours, num_tokens = frames_of(spectrogram(samples, settings))
    assert ours.shape == theirs.T.shape and num_tokens == 375 * -(-len(samples) // 480_000)
    assert np.abs(ours - theirs.T).max() < BOUND


@pytest.mark.parametrize("seconds", [*SECONDS, 35.0])
def test_qwen3_asr(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    extractor = Qwen3ASRFeatureExtractor(feature_size=BANDS)
    how: dict[str, Any] = {"padding": True, "return_tensors": "np", "return_attention_mask": True}
    theirs = extractor([samples / 32768.0], sampling_rate=RATE, **how)
    length = int(theirs["attention_mask"].sum())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_length": 8000}))
    ours, num_tokens = frames_of(spectrogram(samples, spec_of(tmp_path, "qwen3_asr")))
    assert ours.shape == (length, BANDS)
    assert np.abs(ours - theirs["input_features"][0].T[:length]).max() < BOUND
    parts = torch.tensor([100] * (length // 100) + [length % 100])
    assert num_tokens == int(Qwen3ASREncoder._post_cnn_length(parts).sum())


@pytest.mark.parametrize("seconds", [0.1, 1.0, 7.777, 30.0])
def test_gemma_3n(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    (theirs,) = Gemma3nAudioFeatureExtractor()(samples / 32768.0)["input_features"]
    config = {"model_type": "gemma3n", "audio_token_id": 7, "image_token_id": 8}
    config |= {"audio_config": {"input_feat_size": 128}, "vision_config": {}}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 256_000, "content": "<begin>"}]})
    )
    spec = read_media(tmp_path, config)
    assert spec is not None and spec.audio_token == 7 and spec.joins_newlines
    medium = spectrogram(samples, spec.settings)
    ours, num_tokens = frames_of(medium)
    assert num_tokens == 188 + 1 and ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < BOUND
    assert medium.layout == ("\n\n<begin>", 0, "\n\n")  # the tower has the row of what ends it


@pytest.mark.parametrize("seconds", [0.5, 7.777, 30.0])
def test_audio_flamingo_and_glm_asr(tmp_path: Path, seconds: float) -> None:
    samples = sound(seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=BANDS)
    theirs = extractor(
        samples / 32768.0, sampling_rate=RATE, padding="max_length", return_attention_mask=True
    )
    length = int(theirs["attention_mask"].sum())
    conv = (length - 1) // 2 + 1
    for kind, tokens in (("audioflamingo3", (conv - 2) // 2 + 1), ("glmasr", (conv - 4) // 4 + 1)):
        ours, num_tokens = frames_of(spectrogram(samples, spec_of(tmp_path, kind)))
        assert num_tokens == tokens, kind
        seen = min(len(ours), 3000)
        assert np.abs(ours[:seen] - theirs["input_features"][0].T[:seen]).max() < BOUND
    silence = theirs["input_features"][0].T[seen:]  # GLM-ASR's window is filled up with its last
    assert np.abs(silence - ours[-1]).max(initial=0.0) < BOUND


@pytest.mark.parametrize("seconds", [0.1, 7.777, 8.0, 35.0])
def test_nemotron_omni(tmp_path: Path, seconds: float) -> None:
    """A frame of zeros behind the last whole one is counted (MUL-04). Theirs takes logarithms of float32 energies
    near 0."""
    samples = sound(seconds)
    theirs = ParakeetFeatureExtractor(feature_size=BANDS)(
        samples / np.float32(32768.0), sampling_rate=RATE, return_tensors="pt"
    )
    frames = theirs["input_features"][0].numpy()
    config = {
        **{"model_type": "nemotron_h_omni", "vision_config": {}, "image_token_id": 5},
        **{"audio_token_id": 7, "audio_config": {"num_mel_bins": BANDS}},
    }
    spec = read_media(tmp_path, config)
    assert spec is not None and (spec.audio_token, spec.image_token) == (7, 5)
    heard = spectrogram(samples, spec.settings)
    ours, num_tokens = frames_of(heard)
    assert heard.layout == ("<so_start>", 0, "<so_end>")
    assert np.abs(ours - frames).max() < 1e-3 and not ours[-1].any()
    counter = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=8)
    estimate = NemotronH_Omni_Reasoning_V3Processor._estimate_audio_num_embeddings
    assert num_tokens == estimate(counter, len(samples))


@pytest.mark.parametrize("seconds", [0.5, 7.777])
def test_models_that_label_frames(tmp_path: Path, seconds: float) -> None:
    """LASR's frames, and wav2vec 2.0's samples."""
    samples = sound(seconds)
    wave = samples / np.float32(32768.0)
    for kind, extractor in (
        ("lasr_ctc", LasrFeatureExtractor(feature_size=BANDS)),
        ("wav2vec2", transformers.Wav2Vec2FeatureExtractor()),
    ):
        theirs = extractor(wave, sampling_rate=RATE, return_tensors="np")
        frames = np.asarray(next(iter(theirs.values())))[0]
        encoder = {"num_mel_bins": BANDS, "hidden_size": 32}
        config = {"model_type": kind, "vocab_size": 40, "encoder_config": encoder}
        spec = read_media(tmp_path, config)
        assert spec is not None and spec.blank == 0
        ours, _ = frames_of(spectrogram(samples, spec.settings))
        ours = ours.reshape(frames.shape)
        assert np.abs(ours - frames).max() < BOUND


@pytest.mark.parametrize(("half", "hears"), [("SpeechToText", True), ("TextToText", False)])
def test_of_seamless_one_half_hears_and_the_other_reads(
    half: str, hears: bool, tmp_path: Path
) -> None:
    keys = {"model_type": "seamless_m4t", "architectures": [f"SeamlessM4TFor{half}"]}
    speech = read_speech(tmp_path, ConfigReader(keys, "config.json"))
    assert (speech is not None) == hears
