"""Models that label frames, served: OpenAI's client gets the text and the times that the reference's model, extractor
and tokenizer give; long sound is cut where it is quiet; what they cannot do is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import transformers

from headrace.front.media.log_mel import RATE
from headrace.front.media.quiet import windows
from tests.api.clients import openai_client
from tests.api.serving import Served, _started
from tests.api.speech import wav
from tests.front.media.test_log_mel import sound
from tests.models.ctc import CASES, LETTERS, CtcCase


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """A served model and the reference's."""

    case: CtcCase
    folder: Path
    oracle: Any
    client: openai.OpenAI

    def ids(self, samples: np.ndarray) -> list[int]:
        return self.case.logits(self.oracle, samples).argmax(-1).tolist()

    def text(self, samples: np.ndarray) -> str:
        """As the reference's tokenizer joins labels. (Asked to skip special tokens it drops blanks before it joins.)"""
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(self.folder / "vocab.json"))
        return re.sub("<s>|</s>|<unk>", "", tokenizer.decode(self.ids(samples)))

    def words(self, samples: np.ndarray, frame_s: float) -> list[tuple[str, float, float]]:
        """Runs of letters between delimiters, with the times of their first and last frames."""
        words: list[tuple[str, float, float]] = []
        at, apart = 0, True
        for label, run in groupby(self.ids(samples)):
            first, at = at, at + len(list(run))
            letter = LETTERS[label]
            if letter == "|":
                apart = True
            elif len(letter) == 1:
                word, begin = ("", first) if apart else (words[-1][0], words[-1][1] / frame_s)
                if not apart:
                    words.pop()
                words.append((word + letter, begin * frame_s, at * frame_s))
                apart = False
        return words


@pytest.fixture(
    scope="module", params=["wav2vec2", pytest.param("parakeet", marks=pytest.mark.slow)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Labelling]:
    folder = tmp_path_factory.mktemp("ear")
    case = CASES[request.param]
    oracle = case.write(folder)
    server: Served = _started(
        "--model",
        str(folder),
        "--served-model-name",
        "ear",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    try:
        server.wait_ready()
        with openai_client(server.url) as client:
            yield Labelling(case=case, folder=folder, oracle=oracle, client=client)
    finally:
        server.close()


def create(served: Labelling, samples: np.ndarray, **more: Any) -> Any:
    file = ("sound.wav", wav(samples))
    return served.client.audio.transcriptions.create(model="ear", file=file, **more)


def test_text_and_times_are_the_references(served: Labelling) -> None:
    samples = sound(3.21)
    frame_s = 0.02 if served.case.reads_samples else 0.08
    answer = create(
        served,
        samples,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert answer.text == served.text(samples).strip() and answer.text
    found = [(one.word, one.start, one.end) for one in answer.words]
    expected = served.words(samples, frame_s)
    assert [word for word, *_ in found] == [word for word, *_ in expected]
    whole = len(samples) / RATE  # the last frame may reach behind the sound
    times = [(start, min(end, whole)) for _, start, end in expected]
    assert np.allclose([one[1:] for one in found], times, atol=2e-3)
    (segment,) = answer.segments
    assert segment.text == answer.text and segment.start >= 0.0


def test_sounds_beside_each_other_are_heard_as_each_alone(served: Labelling) -> None:
    sounds = [sound(seconds) for seconds in (0.5, 1.0, 2.345, 4.0)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: create(served, one).text, sounds))
    assert answers == [served.text(one).strip() for one in sounds]


def test_long_sound_is_cut_where_it_is_quiet(served: Labelling) -> None:
    samples = sound(37.0)
    samples[28 * RATE : 29 * RATE] = 0
    places = windows(samples, 30 * RATE)
    assert len(places) == 2
    parts = [served.text(samples[begin:end]).strip() for begin, end in places]
    answer = create(served, samples, response_format="text", stream=False)
    assert answer == " ".join(parts) + "\n"
    with create(served, samples, stream=True) as events:
        said = "".join(event.delta for event in events if event.type == "transcript.text.delta")
    assert said == " ".join(parts)


def test_what_it_cannot_do_is_refused(served: Labelling) -> None:
    samples = sound(0.5)
    for more, said in (
        ({"language": "en"}, "takes none"),
        ({"prompt": "names"}, "takes none"),
        ({"temperature": 0.5}, "samples nothing"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            create(served, samples, **more)
    with pytest.raises(openai.BadRequestError, match="too short"):
        create(served, samples[:100])
    with pytest.raises(openai.BadRequestError, match="pools nothing"):
        served.client.embeddings.create(model="ear", input="words")
    with pytest.raises(openai.APIStatusError):
        served.client.chat.completions.create(
            model="ear", messages=[{"role": "user", "content": "words"}]
        )
