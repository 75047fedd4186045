"""Encoder-decoders that write down speech say what transformers says, of sounds of unequal lengths beside each other;
their frames are those of its extractors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import ProcessorSettings
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.media.processors.speech_families import read_speech
from tests.front.media.test_log_mel import sound
from tests.models.listening import answers_to, check_answer
from tests.models.media import save_media_oracle

BANDS, WIDTH = 16, 90
BEGINS = [7, 4, 11]
CONFORMER = {
    **{"model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "intermediate_size": 40, "num_mel_bins": BANDS},
    **{"subsampling_conv_channels": 6, "scale_input": False},
}
DECODER: dict[str, Any] = {
    **{"vocab_size": WIDTH, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 64, "pad_token_id": 2, "eos_token_id": 3, "bos_token_id": 4},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`inputs`: of the reference, for frames [N, bands]. `bound`: of frames beside its extractor's."""

    model: str
    config: Callable[[], Any]
    extractor: Callable[[], Any]
    inputs: Callable[[torch.Tensor], dict[str, Any]]
    seconds: tuple[float, ...] = (0.5, 1.237)
    bound: float = 1e-4
    attention: str = "eager"
    """Of the reference; its eager one adds masks that are no numbers."""


def features(frames: torch.Tensor) -> dict[str, Any]:
    return {"input_features": frames[None], "attention_mask": torch.ones(1, len(frames)).bool()}


SEAMLESS: dict[str, Any] = {
    **{"vocab_size": WIDTH, "hidden_size": 32, "speech_encoder_layers": 2, "decoder_layers": 2},
    **{"speech_encoder_attention_heads": 2, "speech_encoder_intermediate_size": 40},
    **{"decoder_attention_heads": 2, "decoder_ffn_dim": 48, "encoder_layers": 1},
    **{"conv_depthwise_kernel_size": 5, "adaptor_kernel_size": 4, "adaptor_stride": 4},
    **{"max_position_embeddings": 64, "encoder_ffn_dim": 8, "encoder_attention_heads": 2},
}
SPEECH: dict[str, Any] = {
    **{"vocab_size": WIDTH, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 40},
    **{"decoder_ffn_dim": 48, "conv_channels": 24, "input_feat_per_channel": BANDS},
    **{"max_target_positions": 64},
}

CASES = {
    "speech-to-text": Case(
        model="Speech2TextForConditionalGeneration",
        config=lambda: transformers.Speech2TextConfig(**SPEECH),
        extractor=lambda: transformers.Speech2TextFeatureExtractor(
            feature_size=BANDS, num_mel_bins=BANDS
        ),
        inputs=features,
        bound=1e-3,
    ),
    "seamless-m4t": Case(
        model="SeamlessM4TForSpeechToText",
        config=lambda: transformers.SeamlessM4TConfig(**SEAMLESS),
        extractor=transformers.SeamlessM4TFeatureExtractor,
        inputs=features,
        bound=1e-3,
    ),
    "seamless-m4t-v2": Case(
        model="SeamlessM4Tv2ForSpeechToText",
        config=lambda: transformers.SeamlessM4Tv2Config(
            **SEAMLESS,
            left_max_position_embeddings=6,
            right_max_position_embeddings=3,
            speech_encoder_chunk_size=9,
            speech_encoder_left_chunk_num=1,
        ),
        extractor=transformers.SeamlessM4TFeatureExtractor,
        inputs=features,
        bound=1e-3,
        attention="sdpa",
    ),
    "canary": Case(
        model="CanaryForConditionalGeneration",
        config=lambda: transformers.CanaryConfig(
            vocab_size=WIDTH, encoder_config=CONFORMER, decoder_config=DECODER
        ),
        extractor=lambda: ParakeetFeatureExtractor(feature_size=BANDS),
        inputs=features,
        bound=2e-3,  # of bands with mean 0 and deviation 1
    ),
    "cohere-asr": Case(
        model="CohereAsrForConditionalGeneration",
        config=lambda: transformers.CohereAsrConfig(
            **{**DECODER, "decoder_start_token_id": 7},
            encoder_config={**CONFORMER, "hidden_size": 48},
        ),
        extractor=lambda: ParakeetFeatureExtractor(feature_size=BANDS),
        inputs=features,
        bound=2e-3,
    ),
}


SLOW = {"cohere-asr", "seamless-m4t"}
"""Like others of the gate."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_sounds_of_unequal_lengths(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    oracle = save_media_oracle(getattr(transformers, case.model), case.config(), tmp_path)
    oracle.set_attn_implementation(case.attention)
    extractor = case.extractor()
    extractor.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    speech = read_speech(tmp_path, ConfigReader(raw, "config.json"))
    assert speech is not None
    frames = []
    for seconds in case.seconds:
        (one,) = spectrogram(sound(seconds), ProcessorSettings(sound=speech.sound)).inputs
        frames.append(one.rows.view(np.float32))
        wave = sound(seconds) / np.float32(32768.0)
        theirs = extractor(wave, sampling_rate=16_000, return_tensors="pt").input_features[0]
        apart = np.abs(theirs.numpy()[: len(frames[-1])] - frames[-1])
        assert apart.max() < case.bound
    answers = answers_to(tmp_path, frames, BEGINS, width=WIDTH, count=5)
    for one, answer in zip(frames, answers, strict=True):
        inputs = case.inputs(torch.from_numpy(one))

        def logits(ids: list[int], inputs: dict[str, Any] = inputs) -> Any:
            return oracle(**inputs, decoder_input_ids=torch.tensor([ids])).logits[0, -1]

        check_answer(answer, BEGINS, logits)
