"""Voxtral Realtime says what transformers says: sound is added to prompt and answer, token by token (API-01). Whole, in
chunks, beside others, and as its sound begins, whatever follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.base.wire.media import SoundSteps
from headrace.front.client.timed_transcription import marks_of
from tests.models.media import Answer, Prompt, SeeingEngine, compare_answers, save_media_oracle
from tests.models.test_hearing import BANDS, TEXT, Sound

STEPS = SoundSteps(strides=((2, 2, 0),), pool=4)
FRAMES = 8
"""Of a token."""
PREFIX = [1, 5, 5, 5, 5]


def config() -> Any:
    return transformers.VoxtralRealtimeConfig(
        audio_config={
            **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "head_dim": 16, "num_mel_bins": BANDS},
            "sliding_window": 11,
        },
        text_config={**TEXT, "head_dim": 12, "sliding_window": 12},
        default_num_delay_tokens=3,
    )


@dataclass(frozen=True, kw_only=True)
class Realtime:
    """The reference's model and our engine over the same checkpoint."""

    folder: Path
    oracle: Any
    engine: SeeingEngine

    def prompt(self, seed: int, tokens: int, prefix: list[int] = PREFIX) -> Prompt:
        shape = (FRAMES * tokens, BANDS)
        frames = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        sound = Sound(frames=frames, num_tokens=STEPS.tokens(len(frames)))
        assert sound.num_tokens == tokens
        return Prompt(ids=list(prefix), inputs=[sound], offsets=[0])

    def expected(self, prompt: Prompt, count: int) -> Answer:
        """Greedy, a token at a time, each over all of the sound that is heard by then."""
        (sound,) = prompt.inputs
        frames, ids = torch.from_numpy(sound.frames).T[None], list(prompt.ids)
        answer = Answer()
        with torch.inference_mode():
            for number in range(count):
                logits = self.oracle(
                    input_ids=torch.tensor([ids]),
                    input_features=frames[:, :, : FRAMES * len(ids)],
                    num_delay_tokens=3,
                ).logits[0]
                scores = logits.log_softmax(-1).numpy()
                if number == 0:
                    answer.prompt_logprobs = list(scores[:-1])
                answer.logprobs.append(scores[-1])
                answer.tokens.append(int(scores[-1].argmax()))
                ids.append(answer.tokens[-1])
        return answer


@pytest.fixture(scope="module")
def realtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Realtime]:
    folder = tmp_path_factory.mktemp("model")
    cls = transformers.VoxtralRealtimeForConditionalGeneration
    oracle = save_media_oracle(cls, config(), folder)
    engine = SeeingEngine(folder)
    try:
        yield Realtime(folder=folder, oracle=oracle, engine=engine)
    finally:
        engine.close()


def test_a_token_for_each_piece_of_sound(realtime: Realtime) -> None:
    prompt = realtime.prompt(1, 20)
    count = 20 - len(PREFIX)
    (answer,) = realtime.engine.run(prompt, max_tokens=count)
    compare_answers(answer, realtime.expected(prompt, count))


def test_chunks_and_company(realtime: Realtime) -> None:
    """A prompt in pieces of three tokens, answers beside another sound and beside text."""
    engine = realtime.engine.with_steps(realtime.folder, max_step_tokens=3)
    prompts = [realtime.prompt(2, 18), realtime.prompt(3, 14, [1, 7, 8, 9, 5, 5, 5])]
    answers = engine.run(*prompts, max_tokens=7, scored=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == realtime.expected(prompt, 7).tokens


def test_the_beginning_of_a_sound_is_heard_the_same_whatever_follows(realtime: Realtime) -> None:
    """So that sound may be heard while it comes; another sound finds nothing of it in the prefix cache."""
    long, short = realtime.prompt(4, 24), realtime.prompt(4, 24)
    short.inputs[0] = Sound(frames=short.inputs[0].frames[: 14 * FRAMES], num_tokens=14)
    engine = realtime.engine.with_steps(realtime.folder)
    first, second, again = (
        engine.run(one, max_tokens=9, scored=False)[0] for one in (long, short, long)
    )
    assert first.tokens == second.tokens == again.tokens
    assert first.tokens == realtime.expected(long, 9).tokens


def test_more_sound_goes_on_where_less_has_ended(realtime: Realtime) -> None:
    """What was heard and said of the beginning is in the prefix cache; a sound that begins otherwise finds nothing."""
    engine = realtime.engine.with_steps(realtime.folder)
    said: list[int] = []
    for tokens, hit in ((14, 0), (20, 8), (24, 16)):
        prompt = realtime.prompt(6, 24, [*PREFIX, *said])
        frames = np.ascontiguousarray(prompt.inputs[0].frames[: tokens * FRAMES])
        marks = marks_of(frames, FRAMES)
        prompt.inputs[0] = Sound(frames=frames, num_tokens=tokens, marks=marks)
        (answer,) = engine.run(prompt, max_tokens=tokens - len(prompt.ids), scored=False)
        assert answer.num_cached == hit
        said += answer.tokens
    assert said == realtime.expected(realtime.prompt(6, 24), 24 - len(PREFIX)).tokens
    other = realtime.prompt(7, 24, [*PREFIX, *said[:-1]])
    frames = other.inputs[0].frames
    other.inputs[0] = Sound(frames=frames, num_tokens=24, marks=marks_of(frames, FRAMES))
    (answer,) = engine.run(other, max_tokens=1, scored=False)
    assert answer.num_cached == 0
