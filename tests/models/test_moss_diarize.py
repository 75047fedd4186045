"""MOSS Transcribe-Diarize hears as transformers does: the seconds between a sound's tokens, windows of half a minute,
logits and answers, whole and in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.moss_transcribe_diarize import (
    feature_extraction_moss_transcribe_diarize as extraction,
)
from transformers.models.moss_transcribe_diarize import (
    processing_moss_transcribe_diarize as processing,
)

from headrace.base.config.media import MediaSpec
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.spectrogram import spectrogram
from tests.front.media.test_log_mel import sound
from tests.models.media import Answer, SeeingEngine, compare_answers, save_media_oracle
from tests.models.test_hearing import SOUND, TEXT
from tests.models.test_pictures import Ready

BANDS = 16


def config() -> Any:
    return transformers.MossTranscribeDiarizeConfig(
        audio_config={
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 40, "num_mel_bins": BANDS, "max_source_positions": 1500},
        },
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 12},
        audio_token_id=SOUND,
        tie_word_embeddings=True,
    )


def ids_of(text: str) -> list[int]:
    """Digits one by one."""
    return [20 + int(one) for one in text]


@dataclass(frozen=True, kw_only=True)
class Diarizing:
    folder: Path
    oracle: Any
    engine: SeeingEngine
    spec: MediaSpec

    def ready(self, samples: np.ndarray) -> Ready:
        media = spectrogram(samples, self.spec.settings)
        prepared = _prepared(media, "audio", sha256(samples).digest(), 0, 1)
        ids, inputs = expanded([5, 6, SOUND, 7], [prepared], self.spec, ids_of, field="prompt")
        again, _ = expanded(ids, [prepared], self.spec, ids_of, field="prompt")
        assert again == ids
        return Ready(ids, inputs)

    def inputs(self, samples: np.ndarray) -> dict[str, Any]:
        """By the reference's extractor."""
        extractor = extraction.MossTranscribeDiarizeFeatureExtractor(feature_size=BANDS)
        wave = samples / np.float32(32768.0)
        return dict(extractor(wave, sampling_rate=16_000, return_tensors="pt"))

    def expected(self, ids: list[int], samples: np.ndarray) -> Answer:
        with torch.inference_mode():
            given = {"input_ids": torch.tensor([ids]), **self.inputs(samples)}
            rows = list(self.oracle(**given).logits[0].log_softmax(-1).numpy())
        first = int(rows[-1].argmax())
        return Answer(tokens=[first], prompt_logprobs=rows[:-1], logprobs=rows[-1:])


@pytest.fixture(scope="module")
def moss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Diarizing]:
    folder = tmp_path_factory.mktemp("moss")
    kind = transformers.MossTranscribeDiarizeForConditionalGeneration
    oracle = save_media_oracle(kind, config(), folder)
    spec = read_media(folder, json.loads((folder / "config.json").read_text()))
    assert spec is not None and spec.speakers
    engine = SeeingEngine(folder, longest=1024)
    yield Diarizing(folder=folder, oracle=oracle, engine=engine, spec=spec)
    engine.close()


@pytest.mark.parametrize(
    "seconds", [4.37, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.1, 31.3))]
)
def test_a_sound_with_seconds_between_its_tokens(moss: Diarizing, seconds: float) -> None:
    samples = sound(seconds)
    prompt = moss.ready(samples)
    given = moss.inputs(samples)
    counted = processing.MossTranscribeDiarizeProcessor._get_audio_token_length(
        SimpleNamespace(audio_merge_size=4),
        given["input_features_mask"].sum(-1),
        torch.zeros(len(given["input_features_mask"]), dtype=torch.long),
    )
    text = processing.MossTranscribeDiarizeProcessor.replace_audio_token(
        SimpleNamespace(audio_tokens_per_second=12.5, time_marker_every_seconds=2, audio_token="a"),
        {"num_audio_tokens": counted},
        0,
    )
    stands = [SOUND if one == "a" else 20 + int(one) for one in text]
    assert prompt.ids == [5, 6, *stands, 7]
    expected = moss.expected(prompt.ids, samples)
    for cut in (256, 9):
        engine = moss.engine.with_steps(moss.folder, max_step_tokens=cut)
        compare_answers(engine.run(prompt, max_tokens=1)[0], expected)
