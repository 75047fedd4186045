"""Long sounds by a decoder that is scripted: times count from where the sound was cut, and nothing that was said is
lost; the language is that of each file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Written
from tokenizers import decoders, models, pre_tokenizers

from headrace.base.config.resolved import TextSpec
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Ended, Event
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import Heard, Transcriber
from headrace.front.media.log_mel import HOP, RATE
from headrace.front.text.tokenizer_files import load_tokenizer

WINDOW_S = 3
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|transcribe|>"),
    "<|notimestamps|>",
)
WORDS = tuple(f"w{i}" for i in range(40))
TIMES = tuple(f"<|{i * 0.02:.2f}|>" for i in range(WINDOW_S * 50 + 1))
ID = {name: i for i, name in enumerate((*WORDS, *SPECIAL, *TIMES))}


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    folder: Path = tmp_path_factory.mktemp("ear")
    written = Written(models.WordLevel(ID, unk_token="w0"))
    written.pre_tokenizer = pre_tokenizers.Whitespace()
    written.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    written.add_special_tokens(list(SPECIAL))
    written.save(str(folder / "tokenizer.json"))
    text = TextSpec(
        tokenizer_path=str(folder),
        chat_template=None,
        model_names=("ear",),
        generation_defaults={},
        logits_width=len(ID),
        eos_ids=(ID["<|endoftext|>"],),
        max_model_len=64,
        spectrogram=(16, WINDOW_S * RATE // HOP),
    )
    return Transcriber(text, load_tokenizer(str(folder)))


def answering(*answers: list[str]) -> Any:
    """A decoder that gives these, one after the other."""
    left = iter(answers)

    async def ask(
        begins: list[int], params: SamplingParams, sound: bytes
    ) -> AsyncGenerator[Event, None]:
        ids = [ID[name] for name in next(left)]
        yield Delta(index=0, text="", token_ids=ids)
        yield Ended(index=0, reason="stop", num_output=len(ids), cumulative_logprob=-0.1)

    return ask


def heard(ear: Transcriber, samples: np.ndarray, request: SpeechRequest, ask: Any) -> list[Heard]:
    async def collect() -> list[Heard]:
        return [one async for one in ear.heard(ear.windows(samples), request, ask)]

    return asyncio.run(collect())


def test_times_of_ten_windows_follow_the_samples_and_no_word_is_lost(ear: Transcriber) -> None:
    """MUL-06, REG-091: windows are shorter than they may be, and what is said behind the last time of one stays."""
    samples = np.random.default_rng(3).normal(size=27 * RATE).astype(np.float32) * 3000
    samples = samples.astype(np.int16)
    for gap in np.arange(2.4, 26, 2.55):
        samples[int(gap * RATE) : int((gap + 0.2) * RATE)] = 0
    said = [["<|0.00|>", f"w{3 * i}", "<|1.00|>", "<|1.00|>", f"w{3 * i + 1}", "<|1.50|>", f"w{3 * i + 2}"]
            for i in range(13)]  # fmt: skip
    told = heard(ear, samples, SpeechRequest(language="en", times=True), answering(*said))
    assert len(told) >= 10
    starts = [one.window.start for one in told]
    assert starts[0] == 0 and all(2.0 < b - a < 2.9 for a, b in pairwise(starts))
    for one, after in zip(told, [*starts[1:], len(samples) / RATE], strict=True):
        begin = one.window.start
        assert round(begin * RATE) / RATE == begin and one.window.end == after
        times = [(segment.start, segment.end) for segment in one.segments]
        assert times == [(begin, begin + 1.0), (begin + 1.0, begin + 1.5), (begin + 1.5, after)]
    words = [word for one in told for segment in one.segments for word in segment.text.split()]
    assert words == list(WORDS[: 3 * len(told)])


def test_the_language_is_that_of_each_file_and_english_where_none_is_heard(
    ear: Transcriber,
) -> None:
    """MUL-07, REG-092: several at once; one that is stated is not asked for."""
    sound = np.zeros(RATE, np.int16)

    async def told(*heard_first: list[str], stated: str | None = None) -> list[str]:
        request = SpeechRequest(language=stated)
        ask = answering(*heard_first, ["w1"])
        return [one.language async for one in ear.heard(ear.windows(sound), request, ask)]

    async def all_told() -> list[list[str]]:
        languages = (told(["<|de|>"]), told(["<|fr|>"]), told([]), told(["w7"]), told(stated="de"))
        return await asyncio.gather(*languages)

    assert asyncio.run(all_told()) == [["de"], ["fr"], ["en"], ["en"], ["de"]]
