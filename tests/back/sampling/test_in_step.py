"""What steps sample themselves is what the sampler would have sampled behind them, row by row and told alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.back.sampling.features import failures
from headrace.back.sampling.in_step import MOST_WORDS, AskedRows, InStepSampling, StepSamples
from headrace.back.sampling.sampler import Sampler
from headrace.base.errors import InvalidRequest, NonFiniteLogits
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart
from tests.back.sampling.logprobs import assert_same_logprobs

CPU = torch.device("cpu")
WIDTH, MAX_ROWS = 97, 24


def made(**more: bool) -> Sampler:
    return Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=CPU, **more)


def start(sampler: Sampler, row: int, tokens: list[int], sampling: RowSampling) -> None:
    sampler.start(
        RowStart(
            row=row,
            request=row,
            tokens=np.array(tokens, np.int32),
            num_prompt=2,
            num_computed=0,
            sampling=sampling,
        )
    )


def in_step_sampler(
    sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int], sample: list[int]
) -> StepSamples:
    """A step of these rows and two rows of padding."""
    in_step = sampler.needs(np.array(rows)[np.flatnonzero(sample)])
    assert isinstance(in_step, InStepSampling) and sampler.in_step_sampler is not None
    padded = torch.cat([logits, torch.zeros(2, WIDTH)])
    columns = (
        torch.tensor([*values, padding, padding], dtype=torch.int32)
        for values, padding in ((rows, MAX_ROWS), (positions, 0), (sample, 0))
    )
    row_R, position_R, sample_R = columns
    asked = AskedRows(row_R=row_R, position_R=position_R, sample_R=sample_R)
    token_R, logprobs = sampler.in_step_sampler(in_step, padded, sampler.greedy(padded), asked)
    assert logprobs is not None and logprobs.shape == (len(rows) + 2, in_step.words)
    assert in_step.words <= MOST_WORDS
    found = StepSamples.of(logprobs.numpy().ravel(), in_step.words)
    assert found.tokens.tolist() == token_R.tolist()
    return found


WISHES = [
    RowSampling(temperature=0.0, repetition_penalty=1.4, logprobs=5),
    RowSampling(temperature=0.7, seed=3, presence_penalty=1.0, frequency_penalty=0.5),
    RowSampling(temperature=0.0),
    RowSampling(temperature=1.0, seed=9, top_k=7, logprobs=3),
    RowSampling(temperature=0.0, frequency_penalty=-0.5, logprobs=0),
    RowSampling(temperature=1.2, seed=1, top_p=0.9, repetition_penalty=0.8, logprobs=17),
]


def test_steps_sample_what_the_sampler_does_while_rows_come_and_go() -> None:
    """ENG-26, REG-030: counts, scores, and more slots than there were at first; rows of a step that are not sampled
    count nothing."""
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(4)
    ours, theirs = made(on_device=True), made()
    tokens = torch.zeros((MAX_ROWS, 64), dtype=torch.int32)
    length: dict[int, int] = {}
    for step in range(80):
        if len(length) < 4 or (rng.random() < 0.8 and len(length) < 20):
            row = int(rng.choice([row for row in range(MAX_ROWS) if row not in length]))
            known = rng.integers(0, 12, int(rng.integers(2, 9))).tolist()
            tokens[row, : len(known)] = torch.tensor(known)
            length[row] = len(known)
            for sampler in (ours, theirs):
                start(sampler, row, known, WISHES[step % len(WISHES)])
        rows = rng.permutation(list(length)).tolist()
        sample = [int(rng.random() < 0.8) for _ in rows]
        sample[0] = 1
        logits = torch.randint(-9, 9, (len(rows), WIDTH), generator=generator) * 0.25
        at, positions = np.flatnonzero(sample), [length[row] for row in rows]
        asked, wanted_at = np.array(rows)[at], np.array(positions)[at]
        needs = ours.needs(asked)
        if not isinstance(needs, InStepSampling) or not needs.words:
            continue  # greedy rows alone, or random ones
        found = in_step_sampler(ours, logits.clone(), rows, positions, sample)
        feature_rows = logits[torch.from_numpy(at)]
        wanted = theirs.sample(
            feature_rows,
            theirs.greedy(feature_rows),
            rows=asked,
            positions=wanted_at,
            tokens=tokens,
        )
        assert found.tokens[at].tolist() == wanted.token_N.tolist()
        assert found.max_logit[at].tolist() == wanted.max_logit_N.tolist()
        if wanted.logprobs is not None:
            assert found.scores is not None
            assert_same_logprobs(ours.logprobs(found.scores, asked, at), wanted.logprobs)
        for row, token in zip(asked.tolist(), wanted.token_N.tolist(), strict=True):
            tokens[row, length[row]] = token
            length[row] += 1
        for row in [row for row in length if length[row] > 24 or rng.random() < 0.02]:
            del length[row]
            for sampler in (ours, theirs):
                sampler.end(np.array([row]))
    assert ours._penalties.num_slots > 8


def test_rows_without_a_token_are_told_why_and_harm_nobody() -> None:
    """A NaN among the logits is the model's failure; a number that leaves no finite choice is the request's (P26)."""
    sampler = made(on_device=True)
    start(sampler, 0, [1, 2, 3], RowSampling(temperature=0.0, repetition_penalty=1e-45, logprobs=2))
    start(sampler, 1, [1, 2, 3], RowSampling(temperature=0.8, frequency_penalty=0.1, seed=2))
    start(sampler, 2, [1, 2, 3], RowSampling(temperature=0.8, presence_penalty=0.1, seed=2))
    logits = torch.ones(3, WIDTH)
    logits[1, 40] = torch.nan
    found = in_step_sampler(sampler, logits, [0, 1, 2], [3, 3, 3], [1, 1, 1])
    assert ((found.tokens >= 0) & (found.tokens < WIDTH)).all()
    failed = failures(found.max_logit[:3], found.chosen_logit[:3])
    assert {i: type(error) for i, error in failed.items()} == {
        0: InvalidRequest,
        1: NonFiniteLogits,
    }


@pytest.mark.parametrize(
    "beyond",
    [{"logprobs": 21}, {"logprobs": -1}, {"logprob_ids": (4,)}, {"logit_bias": {3: 1.0}},
     {"logprobs": 2, "logprobs_mode": "processed"}, {"dry_multiplier": 1.0}, {"typical_p": 0.5}],
)  # fmt: skip
def test_what_steps_cannot_do_is_left_to_the_sampler(beyond: dict[str, object]) -> None:
    sampler = made(on_device=True)
    start(sampler, 0, [1, 2], RowSampling(temperature=0.9))
    start(sampler, 1, [1, 2], RowSampling(**{"temperature": 0.9, **beyond}))
    assert sampler.needs(np.array([0])) == InStepSampling()
    assert sampler.needs(np.array([0, 1])) == "logits"
    sampler.end(np.array([1]))
    start(sampler, 1, [1, 2], RowSampling(temperature=0.0, logprobs=20))
    assert sampler.needs(np.array([0, 1])) == InStepSampling(alternatives=20)
