"""Models that label frames of sound give transformers' logits, of sounds end to end and of one alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.config.ctc import with_encoder_sizes
from headrace.front.client.ctc_transcription import emitted
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.spectrogram import spectrogram
from tests.front.media.test_log_mel import sound
from tests.models.ctc import CASES, TRANSDUCERS, transducer
from tests.models.oracle import load_ours, model_spec

BOUND = 1e-4
SECONDS = (0.5, 1.237)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # by the reference
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()],
)
def test_logits_of_every_frame(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    oracle = case.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    media = read_media(tmp_path, config)
    assert media is not None and media.transcribes and media.blank == 0
    heard = [spectrogram(sound(seconds), media.settings).inputs[0] for seconds in SECONDS]
    ours = load_ours(model_spec(tmp_path, **with_encoder_sizes(config)))
    assert ours.media is not None and not ours.generates
    rows = torch.from_numpy(np.concatenate([one.rows for one in heard]))
    with torch.inference_mode():
        hidden = ours.media.encode("audio", rows, [one.grid for one in heard])
        logits = ours.classify(hidden).split([one.num_tokens for one in heard])
    for seconds, one, found in zip(SECONDS, heard, logits, strict=True):
        expected = case.logits(oracle, sound(seconds), one.rows.view(np.float32))
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < BOUND


@pytest.mark.parametrize(
    "name",
    # What streams and is asked for more has all of the plain one.
    [pytest.param(one, marks=[pytest.mark.slow] * (one == "streaming")) for one in TRANSDUCERS],
)
def test_what_every_frame_emits(name: str, tmp_path: Path) -> None:
    """Tokens, the frames they begin at, and with durations how long they last: as the reference's greedy search."""
    _, oracle = transducer(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    media = read_media(tmp_path, config)
    assert media is not None and media.emits
    ours = load_ours(model_spec(tmp_path, **with_encoder_sizes(config)))
    heard = [spectrogram(sound(seconds), media.settings).inputs[0] for seconds in (1.0, 2.237)]
    rows = torch.from_numpy(np.concatenate([one.rows for one in heard]))
    with torch.inference_mode():
        hidden = ours.media.encode("audio", rows, [one.grid for one in heard])
        told = ours.classify(hidden).split([one.num_tokens for one in heard])
    for one, found in zip(heard, told, strict=True):
        frames = torch.from_numpy(one.rows.view(np.float32).copy())[None]
        mask = torch.ones(1, frames.shape[1], dtype=torch.bool)
        most = 10 * frames.shape[1]
        said = oracle.generate(input_features=frames, attention_mask=mask, max_new_tokens=most)
        tokens, steps = said.sequences[0, 1:].tolist(), said.durations[0, 1:].tolist()
        places = np.cumsum([0, *steps])[: len(tokens)].tolist()
        blank = config["blank_token_id"]
        expected = [
            (token, place, place + (max(1, step) if name == "tdt" else 1))
            for token, place, step in zip(tokens, places, steps, strict=True)
            if token != blank
        ]
        labels = emitted(found.numpy())
        assert [(label.id, label.first, label.end) for label in labels] == expected and expected
        assert all(label.score <= 0.0 for label in labels)
