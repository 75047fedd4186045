"""What steps sample themselves is what the sampler would have sampled behind them, row by row and told alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.back.runner.results import SampledTokens
from headrace.back.sampling.features import failures
from headrace.back.sampling.in_step import MOST_WORDS, AskedRows, InStepSampling, StepSamples
from headrace.back.sampling.sampler import Sampler
from headrace.base.errors import InvalidRequest, NonFiniteLogits
from headrace.base.wire.grammar import NOTHING, pack_masks
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
    sampler: Sampler,
    logits: torch.Tensor,
    rows: list[int],
    positions: list[int],
    sample: list[int],
    *,
    tokens: torch.Tensor | None = None,
    masks: memoryview | None = None,
) -> StepSamples:
    """A step of these rows and two rows of padding; `masks`: the grammar's payload."""
    asked_rows = np.array(rows)[np.flatnonzero(sample)]
    in_step = sampler.needs(asked_rows, grammar=masks is not None)
    assert isinstance(in_step, InStepSampling)
    if masks is not None:
        sampler.take_masks(masks, np.array(rows), np.arange(len(rows)))
    if tokens is None:
        tokens = torch.zeros((MAX_ROWS, 64), dtype=torch.int32)
    nobody = torch.zeros((1, tokens.shape[1]), dtype=torch.int32)
    padded = torch.cat([logits, torch.zeros(2, WIDTH)])
    columns = (
        torch.tensor([*values, padding, padding], dtype=torch.int32)
        for values, padding in ((rows, MAX_ROWS), (positions, 0), (sample, 0))
    )
    row_R, position_R, sample_R = columns
    asked = AskedRows(
        row_R=row_R,
        position_R=position_R,
        sample_R=sample_R,
        tokens_MC=torch.cat([tokens, nobody]),
    )
    chosen = sampler.in_step_sampler(in_step, padded, asked)
    sampler.in_step_sampler.count(in_step, chosen.token_R, asked, sample_R)
    if chosen.words_RW is None:
        values = chosen.token_R.int(), chosen.max_logit_R.view(torch.int32)
        return StepSamples.of(torch.stack(values).numpy(), 0, masked=in_step.masks)
    assert chosen.words_RW.shape == (len(rows) + 2, in_step.words)
    assert in_step.words <= MOST_WORDS
    samples = StepSamples.of(chosen.words_RW.numpy().ravel(), in_step.words)
    assert samples.tokens.tolist() == chosen.token_R.tolist()
    return samples


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


MASKED = [
    RowSampling(temperature=0.0, logit_bias={3: 1.5, 40: -2.0, 96: 0.25}),
    RowSampling(temperature=0.0, allowed_ids=(1, 7, 30, 31, 32, 64, 95)),
    RowSampling(temperature=0.0, min_tokens=6, suppressed_ids=(2, 3, 5, 60)),
    RowSampling(temperature=0.0, bad_words=((4,), (1, 6), (2, 3, 7), (0, 1, 2, 3, 8))),
    RowSampling(temperature=0.0),
]
RANDOM = [
    RowSampling(temperature=0.9, seed=2, logit_bias={5: 3.0}, top_k=9, presence_penalty=0.7),
    RowSampling(temperature=0.7, seed=4, allowed_ids=tuple(range(0, 97, 3)), logprobs=2),
    RowSampling(
        temperature=1.1, seed=5, min_tokens=3, suppressed_ids=(8, 9), bad_words=((1,), (2, 2))
    ),
    RowSampling(temperature=1.0, seed=6, top_p=0.8),
]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_masks_and_biases_of_steps_are_the_samplers(seed: int, on_device: bool) -> None:
    """ENG-26: rows of every kind, with and without masks of grammars, whose payload may be
    narrower or wider than the vocabulary; rows that have ended leave nothing to those after."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    kinds = MASKED + (RANDOM if on_device else [])
    steps, host = made(on_device=on_device), made()
    tokens = torch.zeros((MAX_ROWS, 64), dtype=torch.int32)
    length: dict[int, int] = {}
    for step in range(60):
        if len(length) < 4 or (rng.random() < 0.7 and len(length) < 12):
            row = int(rng.choice([row for row in range(MAX_ROWS) if row not in length]))
            known = rng.integers(0, 9, int(rng.integers(2, 9))).tolist()
            tokens[row, : len(known)] = torch.tensor(known)
            length[row] = len(known)
            sampling = kinds[int(rng.integers(len(kinds)))]
            for sampler in (steps, host):
                start(sampler, row, known, sampling)
        rows = rng.permutation(list(length)).tolist()
        positions = [length[row] for row in rows]
        masked = np.array([row for row in rows if rng.random() < 0.4], np.int32)
        words = (3, 4, 6)[step % 3]
        bits = rng.integers(-(2**31), 2**31, (len(masked), words)).astype(np.int32)
        bits[:, 0] |= np.int32(2)  # id 1 is allowed by all masks of this test
        masks = pack_masks(masked, bits) if step % 4 else NOTHING
        logits = torch.randint(-9, 9, (len(rows), WIDTH), generator=generator) * 0.25
        if step % 7 == 3:
            logits[0, 50] = torch.nan
        samples = in_step_sampler(
            steps, logits.clone(), rows, positions, [1] * len(rows), tokens=tokens, masks=masks
        )
        arrays = np.array(rows), np.array(positions)
        expected = host.sample(
            logits,
            host.greedy(logits),
            rows=arrays[0],
            positions=arrays[1],
            tokens=tokens,
            masks=masks,
        )
        drawn = SampledTokens(
            tokens=samples.tokens,
            max_logit=samples.max_logit,
            chosen_logit=samples.chosen_logit,
            index=np.arange(len(rows)),
            masked=samples.masked,
        )
        token_N, failed = drawn.read()
        chosen_logit = expected.chosen_logit_N
        expected_failed = failures(
            expected.max_logit_N.numpy(), None if chosen_logit is None else chosen_logit.numpy()
        )
        assert {i: type(e) for i, e in failed.items()} == {
            i: type(e) for i, e in expected_failed.items()
        }
        stands = [i for i in range(len(rows)) if i not in failed]
        assert token_N[stands].tolist() == expected.token_N[stands].tolist()
        for i in range(len(rows)):
            tokens[rows[i], length[rows[i]]] = int(expected.token_N[i])
            length[rows[i]] += 1
        ended = {rows[i] for i in failed}
        ended |= {row for row in length if length[row] > 24 or rng.random() < 0.05}
        for row in sorted(ended):
            del length[row]
            for sampler in (steps, host):
                sampler.end(np.array([row]))


def test_a_mask_that_leaves_nothing_is_the_requests_failure() -> None:
    sampler = made()
    start(sampler, 0, [1, 2, 3], RowSampling(temperature=0.0, bad_words=((7,),)))
    masks = pack_masks(np.array([0], np.int32), np.array([[1 << 7, 0, 0, 0]], np.int32))
    samples = in_step_sampler(sampler, torch.zeros(1, WIDTH), [0], [3], [1], masks=masks)
    index = np.arange(1)
    tokens = SampledTokens(
        tokens=samples.tokens, max_logit=samples.max_logit, index=index, masked=True
    )
    token_N, failed = tokens.read()
    assert 0 <= token_N[0] < WIDTH
    assert [type(error) for error in failed.values()] == [InvalidRequest]


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
    [{"logprobs": 21}, {"logprobs": -1}, {"logprob_ids": (4,)},
     {"logit_bias": dict.fromkeys(range(1100), 1.0)}, {"bad_words": (tuple(range(65)),)},
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
