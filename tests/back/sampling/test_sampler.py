"""Every option, alone and in pairs, in mixed batches, equals a naive reference token by token."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.back.sampling.features import FeatureRows, failures
from headrace.back.sampling.logprobs import LARGEST_MASK
from headrace.back.sampling.sampler import Sampler
from headrace.base.errors import HeadraceError, InvalidRequest, NonFiniteLogits
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowLogprobs, RowStart
from tests.back.sampling import reference

WIDTH = 97
WIDE = 2003
MAX_ROWS = 64
HERE = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])], autouse=True
)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file runs on both devices."""
    monkeypatch.setattr(f"{__name__}.HERE", torch.device(request.param))


@dataclass(kw_only=True)
class Seen:
    """What the host sees of a step."""

    token_N: torch.Tensor
    failed: dict[int, HeadraceError]
    logprobs: list[RowLogprobs]


def sample(
    sampler: Sampler,
    logits: torch.Tensor,
    *,
    rows: np.ndarray,
    positions: np.ndarray,
    tokens: torch.Tensor,
) -> Seen:
    logits = logits.to(HERE)
    argmax = sampler.greedy(logits)
    result = sampler.sample(logits, argmax, rows=rows, positions=positions, tokens=tokens.to(HERE))
    if HERE.type == "cuda":
        torch.cuda.synchronize()
    chosen_logit = None if result.chosen_logit_N is None else result.chosen_logit_N.cpu().numpy()
    failed = failures(result.max_logit_N.cpu().numpy(), chosen_logit)
    logprobs = [] if result.logprobs is None else list(result.logprobs.rows())
    return Seen(
        token_N=result.token_N.cpu(),
        failed=failed,
        logprobs=[row for row in logprobs if row.index not in failed],
    )


OPTIONS: dict[str, list[dict[str, object]]] = {
    "plain": [{}],
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.3}, {"temperature": 2.5}, {"temperature": 1e-3}],
    "top_k": [{"top_k": 1}, {"top_k": 5}, {"top_k": 40}, {"top_k": 5000}, {"top_k": -1}],
    "top_p": [{"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 0.9999}],
    "min_p": [{"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 1e-6}],
    "typical_p": [{"typical_p": 0.8}, {"typical_p": 0.1}],
    "repetition": [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}],
    "presence": [{"presence_penalty": 1.5}, {"presence_penalty": -2.0}],
    "frequency": [{"frequency_penalty": 0.7}, {"frequency_penalty": -0.4}],
    "min_tokens": [{"min_tokens": 9, "suppressed_ids": (3, 5)}, {"min_tokens": 1}],
    "bad_words": [{"bad_words": ((7,), (1, 2, 8), (2, 9), (4, 4, 4, 4, 4))}],
    "allowed": [{"allowed_ids": tuple(range(0, 60, 2))}, {"allowed_ids": (11,)}],
    "bias": [{"logit_bias": {3: 4.0, 4: -100.0}}, {"logit_bias": {0: 0.5}}],
    "dry": [
        {"dry_multiplier": 0.8},
        {"dry_multiplier": 2.0, "dry_breaker_ids": (1, 2), "dry_allowed_length": 1},
        {"dry_multiplier": 1.0, "dry_range": 7, "dry_base": 1.1},
    ],
    "xtc": [{"xtc_probability": 1.0, "xtc_threshold": 0.05}, {"xtc_probability": 0.5}],
}


def start_of(row: int, tokens: list[int], num_prompt: int, sampling: RowSampling) -> RowStart:
    return RowStart(
        row=row,
        request=row,
        tokens=np.array(tokens, np.int32),
        num_prompt=num_prompt,
        num_computed=0,
        sampling=sampling,
    )


class Case:
    """A row to sample: what it asked for, its history and its logits."""

    def __init__(self, rng: np.random.Generator, options: dict[str, object], width: int) -> None:
        self.sampling = RowSampling(seed=int(rng.integers(0, 2**63)), **options)
        self.num_prompt = int(rng.integers(1, 12))
        history = rng.integers(0, 10, self.num_prompt + int(rng.integers(0, 20)))
        self.tokens = [int(token) for token in history]
        self.logits = (rng.standard_normal(width) * rng.choice([0.5, 3.0, 8.0])).astype(np.float32)
        if rng.random() < 0.3:
            self.logits = np.round(self.logits)

    def wanted(self) -> int:
        return reference.sample(self.logits, self.sampling, self.tokens, self.num_prompt)


def run(sampler: Sampler, cases: list[Case], rows: list[int]) -> Seen:
    """Starts the cases in the rows, samples them in one step and gives the rows back."""
    tokens = torch.zeros(MAX_ROWS, 64, dtype=torch.int32)
    for row, case in zip(rows, cases, strict=True):
        tokens[row, : len(case.tokens)] = torch.tensor(case.tokens)
        sampler.start(start_of(row, case.tokens, case.num_prompt, case.sampling))
    result = sample(
        sampler,
        torch.from_numpy(np.stack([case.logits for case in cases])),
        rows=np.array(rows),
        positions=np.array([len(case.tokens) for case in cases]),
        tokens=tokens,
    )
    sampler.end(np.array(rows))
    return result


def merged(rng: np.random.Generator, names: tuple[str, ...]) -> dict[str, object]:
    """One random setting of each named option in one request."""
    found: dict[str, object] = {}
    for name in names:
        found |= OPTIONS[name][rng.integers(len(OPTIONS[name]))]
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", [WIDTH, WIDE])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone_equals_the_reference(name: str, width: int) -> None:
    rng = np.random.default_rng(len(name))
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=width, device=HERE)
    for options in OPTIONS[name]:
        cases = [Case(rng, options, width) for _ in range(12)]
        result = run(sampler, cases, rng.permutation(MAX_ROWS)[:12].tolist())
        assert result.token_N.tolist() == [case.wanted() for case in cases]


def test_pairs_of_options_in_mixed_batches_equal_the_reference() -> None:
    """ENG-27, P17: all pairs, shuffled into batches over one sampler, so that every row is used again and again."""
    rng = np.random.default_rng(1)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    pairs = list(itertools.combinations(OPTIONS, 2)) * 4
    rng.shuffle(pairs)
    cases = [Case(rng, merged(rng, pair), WIDTH) for pair in pairs]
    cases += [Case(rng, merged(rng, tuple(OPTIONS)[2:]), WIDTH) for _ in range(40)]
    rng.shuffle(cases)
    while cases:
        batch, cases = cases[:37], cases[37:]
        result = run(sampler, batch, rng.permutation(MAX_ROWS)[: len(batch)].tolist())
        wanted = [case.wanted() for case in batch]
        assert result.token_N.tolist() == wanted
        assert not result.failed


@pytest.mark.parametrize(
    "name",
    ["repetition", "presence", "frequency", "bias", "dry", "allowed", "min_tokens", "bad_words"],
)
def test_each_change_of_the_logits_equals_the_reference_value_by_value(name: str) -> None:
    """Also where the history is short, repeats itself, or is just as long as min_tokens."""
    rng = np.random.default_rng(12)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    for options in OPTIONS[name]:
        cases = [Case(rng, options, WIDTH) for _ in range(60)]
        for case in cases[::2]:
            case.tokens = rng.integers(3, 5, rng.integers(case.num_prompt, 24)).tolist()
        for case in cases[::3]:
            case.tokens = [4] * int(rng.integers(case.num_prompt, case.num_prompt + 12))
        tokens = torch.zeros(MAX_ROWS, 64, dtype=torch.int32)
        for row, case in enumerate(cases):
            tokens[row, : len(case.tokens)] = torch.tensor(case.tokens)
            sampler.start(start_of(row, case.tokens, case.num_prompt, case.sampling))
        feature_rows = FeatureRows(
            rows=np.arange(60),
            positions=np.array([len(case.tokens) for case in cases]),
            num_output=np.array([len(case.tokens) - case.num_prompt for case in cases]),
            tokens=tokens.to(HERE),
        )
        logits = torch.from_numpy(np.stack([case.logits for case in cases])).to(HERE)
        sampler.apply(logits, sampler.numbers.use[:60], feature_rows)
        for row, case in enumerate(cases):
            wanted = reference.processed(case.logits, case.sampling, case.tokens, case.num_prompt)
            np.testing.assert_allclose(logits[row].cpu().numpy(), wanted, rtol=1e-6, atol=1e-6)
        sampler.end(np.arange(60))


def test_pairs_of_truncations_on_wide_rows_equal_the_reference() -> None:
    """KRN-02: the candidates found without sorting keep exactly what a sort would, ties included."""
    rng = np.random.default_rng(2)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDE, device=HERE)
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc", "allowed")
    cases = [
        Case(rng, merged(rng, pair), WIDE)
        for pair in itertools.permutations(names, 2)
        for _ in "12"
    ]
    for case in cases[::7]:
        case.logits[:] = case.logits[0]
    for case in cases[::5]:
        case.logits[rng.permutation(WIDE)[: WIDE - 30]] = -np.inf
        case.logits[10] = 1.0
    for case in cases[::11]:
        case.logits *= np.float32(1e-42)
    while cases:
        batch, cases = cases[:20], cases[20:]
        batch = [
            c
            for c in batch
            if np.isfinite(reference.processed(c.logits, c.sampling, c.tokens, c.num_prompt)).any()
        ]
        result = run(sampler, batch, list(range(len(batch))))
        assert result.token_N.tolist() == [case.wanted() for case in batch]


def draws(sampler: Sampler, logits: np.ndarray, sampling: RowSampling, count: int) -> np.ndarray:
    """`count` tokens of one distribution: many rows of one seed, each step at other positions."""
    sampler.start(start_of(0, [1], 1, sampling))
    rows = np.zeros(2000, np.int64)
    tokens = torch.zeros(MAX_ROWS, 1, dtype=torch.int32)
    found = [
        sample(
            sampler,
            torch.from_numpy(logits).expand(2000, -1).clone(),
            rows=rows,
            positions=np.arange(start, start + 2000),
            tokens=tokens,
        ).token_N.numpy()
        for start in range(0, count, 2000)
    ]
    sampler.end(np.array([0]))
    return np.concatenate(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.7}],
)
def test_frequencies_follow_the_distribution(options: dict[str, float]) -> None:
    """ENG-25: chi-square over 100,000 draws from 64 tokens, and nothing that truncation removes."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(64) * 1.5).astype(np.float32)
    sampling = RowSampling(seed=11, **options)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=64, device=HERE)
    counts = np.bincount(draws(sampler, logits, sampling, 100_000), minlength=64)
    z = reference.kept(logits, sampling, 0)
    expected = {token: p * 100_000 for token, p in reference.softmax(z).items()}
    assert counts.sum() == sum(counts[token] for token in expected)
    terms = [(counts[token] - e) ** 2 / e for token, e in expected.items() if e > 5]
    bound = len(terms) - 1 + 5 * (2 * len(terms)) ** 0.5
    assert sum(terms) < bound


def test_tokens_far_below_the_best_are_drawn_as_often_as_they_should_be() -> None:
    """REG-029: 1023 tokens 10 nats below one, together 4.4 %."""
    logits = np.full(1024, -10.0, np.float32)
    logits[17] = 0.0
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=1024, device=HERE)
    found = draws(sampler, logits, RowSampling(seed=1), 40_000)
    share = 1023 * np.exp(-10.0) / (1 + 1023 * np.exp(-10.0))
    assert abs((found != 17).mean() - share) < 5 * (share / 40_000) ** 0.5
    assert len(np.unique(found)) > 700


def test_the_token_does_not_depend_on_batch_size_order_or_neighbours() -> None:
    """ENG-25, REG-026: same seed, position and logits: same token."""
    rng = np.random.default_rng(9)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    names = tuple(OPTIONS)
    cases = [Case(rng, merged(rng, (names[i % 16], names[i * 5 % 16])), WIDTH) for i in range(48)]
    alone = [run(sampler, [case], [3]).token_N.item() for case in cases]
    for size in (2, 7, 48):
        order = rng.permutation(48)
        for start in range(0, 48, size):
            part = order[start : start + size]
            rows = rng.permutation(MAX_ROWS)[: len(part)].tolist()
            result = run(sampler, [cases[i] for i in part], rows)
            assert result.token_N.tolist() == [alone[i] for i in part]


def test_greedy_ties_go_to_the_lowest_id_at_every_batch_size() -> None:
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    case = Case(np.random.default_rng(0), {"temperature": 0.0}, WIDTH)
    case.logits = np.full(WIDTH, -1.0, np.float32)
    case.logits[[13, 40, 96]] = 2.0
    for size in (1, 2, 3, 8, 33):
        assert run(sampler, [case] * size, list(range(size))).token_N.tolist() == [13] * size


BROKEN = {
    "a NaN": lambda x: x.__setitem__(5, np.nan),
    "+Inf": lambda x: x.__setitem__(5, np.inf),
    "all -Inf": lambda x: x.fill(-np.inf),
    "all NaN": lambda x: x.fill(np.nan),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("greedy_only", [True, False])
def test_a_row_that_is_not_finite_fails_alone(kind: str, greedy_only: bool) -> None:
    """Reliability 1.15; P26: its id stays within the vocabulary all the same."""
    rng = np.random.default_rng(3)
    names = ["greedy"] * 16 if greedy_only else list(OPTIONS)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    cases = [Case(rng, OPTIONS[name][0], WIDTH) for name in names]
    wanted = [case.wanted() for case in cases]
    for broken in range(len(cases)):
        healthy = cases[broken].logits.copy()
        BROKEN[kind](cases[broken].logits)
        result = run(sampler, cases, list(range(len(cases))))
        cases[broken].logits = healthy
        assert list(result.failed) == [broken]
        assert isinstance(result.failed[broken], NonFiniteLogits)
        assert 0 <= int(result.token_N[broken]) < WIDTH
        assert [t for i, t in enumerate(result.token_N.tolist()) if i != broken] == [
            t for i, t in enumerate(wanted) if i != broken
        ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_no_token_fail_that_request_with_a_reason(temperature: float) -> None:
    """REG-026."""
    rng = np.random.default_rng(4)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    masked = Case(
        rng,
        {"allowed_ids": (4,), "bad_words": ((4,),), "temperature": temperature, "logprobs": 2},
        WIDTH,
    )
    other = Case(rng, {}, WIDTH)
    result = run(sampler, [masked, other], [0, 1])
    assert list(result.failed) == [0] and isinstance(result.failed[0], InvalidRequest)
    assert int(result.token_N[1]) == other.wanted()
    assert result.logprobs == []


def test_counts_are_right_over_steps_after_row_reuse_and_after_resuming() -> None:
    """REG-030, ENG-26: penalties see what the sampler sampled, nothing of an earlier owner, all after a resume."""
    rng = np.random.default_rng(6)
    sampler = Sampler(max_rows=4, logits_width=WIDTH, device=HERE)
    tokens = torch.zeros(4, 64, dtype=torch.int32)
    options = {"frequency_penalty": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2}
    for request in range(6):
        case = Case(rng, {**options, "temperature": 0.0 if request % 2 else 1.0}, WIDTH)
        history = case.tokens[: case.num_prompt]
        sampler.start(start_of(1, history, case.num_prompt, case.sampling))
        for step in range(12):
            if step == 7:
                sampler.end(np.array([1]))
                sampler.start(start_of(1, history, case.num_prompt, case.sampling))
            logits = (rng.standard_normal(WIDTH) * 2).astype(np.float32)
            wanted = reference.sample(logits, case.sampling, history, case.num_prompt)
            tokens[1, : len(history)] = torch.tensor(history)
            result = sample(
                sampler,
                torch.from_numpy(logits[None]),
                rows=np.array([1]),
                positions=np.array([len(history)]),
                tokens=tokens,
            )
            assert result.token_N.tolist() == [wanted]
            history.append(wanted)
        sampler.end(np.array([1]))


def test_being_told_costs_greedy_rows_no_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and bits as beside a row whose logits are processed."""
    logits = 3 * torch.randn(4, 97, generator=torch.Generator().manual_seed(4))
    logprobs = RowSampling(temperature=0.0, logprobs=3, logprob_ids=(5,))
    found = []
    for last in (RowSampling(temperature=0.0), RowSampling(temperature=0.7, presence_penalty=1.0)):
        sampler = Sampler(max_rows=4, logits_width=97, device=HERE)
        for row, sampling in enumerate((logprobs, logprobs, logprobs, last)):
            sampler.start(start_of(row, [1, 2, 3], 2, sampling))
        argmax = sampler.greedy(logits.to(HERE))
        if last.greedy:
            monkeypatch.setattr(sampler, "greedy", None)
        where = {"rows": np.arange(4), "positions": np.full(4, 3)}
        tokens = torch.tensor([[1, 2, 3, 0]] * 4, dtype=torch.int32, device=HERE)
        seen = sampler.sample(logits.to(HERE), argmax, **where, tokens=tokens)
        if HERE.type == "cuda":
            torch.cuda.synchronize()
        assert seen.logprobs is not None
        scores = [
            (one.ids.tolist(), one.values.tobytes(), one.rank) for one in seen.logprobs.rows()
        ]
        found.append((seen.token_N[:3].tolist(), scores))
    assert found[0] == found[1] and found[0][0] == logits[:3].argmax(1).tolist()


def test_logprobs_are_of_the_raw_distribution_with_alternatives_rank_and_named_ids() -> None:
    """Raw log-softmax, whatever processing does; ties in falling order go to the lowest id."""
    rng = np.random.default_rng(7)
    sampler = Sampler(max_rows=MAX_ROWS, logits_width=WIDTH, device=HERE)
    kinds: list[dict[str, object]] = [
        {"logprobs": 3, "logit_bias": {50: 100.0}},
        {"logprobs": 0},
        {"logprobs": -1, "temperature": 0.0},
        {},
        {"logprob_ids": (9, 2), "top_k": 3, "repetition_penalty": 1.4},
        {"logprobs": 5, "logprob_ids": (1,)},
    ]
    cases = [Case(rng, options, WIDTH) for options in kinds]
    zeros = rng.choice(np.array([-0.0, 0.0], np.float32), WIDTH)
    cases[5].logits = np.where(rng.random(WIDTH) < 0.5, zeros, np.float32(-1.0))
    result = run(sampler, cases, [8, 3, 5, 1, 2, 9])
    assert [found.index for found in result.logprobs] == [0, 1, 2, 4, 5]
    for found in result.logprobs:
        case, s = cases[found.index], cases[found.index].sampling
        x = case.logits.astype(np.float64)
        exact = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        count = WIDTH if s.logprobs == -1 else s.logprobs or 0
        top = sorted(range(WIDTH), key=lambda i: (-x[i], i))[:count]
        token = int(result.token_N[found.index])
        assert found.ids.tolist() == [token, *top, *s.logprob_ids]
        np.testing.assert_allclose(found.values, exact[found.ids], atol=2e-6)
        assert found.rank == 1 + int((x > x[token]).sum())
    assert int(result.token_N[0]) == 50


EXTREMES: list[dict[str, object]] = [
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"temperature": 1e300, "allowed_ids": (1, 2)},
    {"temperature": 5e-324, "top_p": 0.5},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300, "temperature": 0.0},
    {"frequency_penalty": -1e300},
    {"presence_penalty": 1e300, "top_k": 3},
    {"logit_bias": {3: 1e300}},
    {"logit_bias": {3: 1e300, 5: -1e300}, "top_p": 0.4},
    {"top_p": -1.0},
    {"top_p": 0.0, "min_p": 5.0},
    {"min_p": -3.0, "typical_p": -1.0},
    {"dry_multiplier": 1e300, "dry_base": 1e300},
    {"dry_multiplier": 1.0, "dry_base": -3.0, "dry_allowed_length": -5},
    {"dry_multiplier": 1.0, "dry_base": 0.0, "dry_allowed_length": 2**40, "dry_range": -7},
    {"xtc_probability": 9.0, "xtc_threshold": -4.0},
    {"bad_words": ((), ())},
    {"bad_words": ((), (3,))},
    {"top_k": 2**60, "seed": -(2**63)},
]


@pytest.mark.parametrize("extreme", EXTREMES)
def test_no_number_a_request_may_carry_ends_the_step_or_touches_a_neighbour(
    extreme: dict[str, object],
) -> None:
    """One bad request never hurts another: it gets a token of the vocabulary or fails alone."""
    rng = np.random.default_rng(1)
    for width in (WIDTH, WIDE):
        sampler = Sampler(max_rows=MAX_ROWS, logits_width=width, device=HERE)
        before, bad, after = (
            Case(rng, {}, width),
            Case(rng, {}, width),
            Case(rng, {"top_p": 0.9}, width),
        )
        bad.sampling = RowSampling(**extreme)
        result = run(sampler, [before, bad, after], [4, 1, 2])
        assert set(result.failed) <= {1}
        assert all(0 <= token < width for token in result.token_N.tolist())
        assert result.token_N[[0, 2]].tolist() == [before.wanted(), after.wanted()]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.7, "repetition_penalty": 1.4},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 4.0}},
        {"temperature": 1.0},
        {"temperature": 0.0, "presence_penalty": 1.5},
    ],
)
def test_processed_mode_tells_the_distribution_that_is_drawn_from(
    options: dict[str, object],
) -> None:
    """REG-023; a row beside it in raw mode is told the model's own."""
    rng = np.random.default_rng(23)
    cases = [
        Case(rng, {**options, "logprobs": 3, "logprobs_mode": "processed"}, 24),
        Case(rng, {**options, "logprobs": 3}, 24),
    ]
    logprobs = run(Sampler(max_rows=4, logits_width=24, device=HERE), cases, [2, 0]).logprobs
    for case, scores in zip(cases, logprobs, strict=True):
        z = dict(enumerate(case.logits.astype(np.float64)))
        if case.sampling.logprobs_mode == "processed":
            x = reference.processed(case.logits, case.sampling, case.tokens, case.num_prompt)
            z = dict(enumerate(x))
            if not case.sampling.greedy:
                z = reference.kept(x, case.sampling, len(case.tokens))
        wanted = {i: math.log(p) for i, p in reference.softmax(z).items() if p > 0}
        for token, value in zip(scores.ids.tolist(), scores.values.tolist(), strict=True):
            assert value == pytest.approx(wanted.get(token, -math.inf), abs=1e-4)
        assert scores.ids[1] == max(wanted, key=lambda i: (wanted[i], -i))


def test_a_sampling_mask_is_what_truncation_left_and_bounded() -> None:
    """A row whose mask would be too large fails alone."""
    width = LARGEST_MASK + 200
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((4, width)).astype(np.float32))
    masked = {"logprobs": 0, "sampling_mask": True}
    asked = [
        RowSampling(temperature=0.8, top_k=7, **masked),
        RowSampling(temperature=1.0, **masked),
        RowSampling(temperature=0.0, **masked),
        RowSampling(temperature=0.7, logprobs=0),
    ]
    sampler = Sampler(max_rows=4, logits_width=width, device=HERE)
    for row, sampling in enumerate(asked):
        sampler.start(start_of(row, [1, 2, 3], 2, sampling))
    logits = logits.to(HERE)
    seen = sampler.sample(
        logits.clone(),
        sampler.greedy(logits),
        rows=np.arange(4),
        positions=np.full(4, 3),
        tokens=torch.tensor([[1, 2, 3, 0]] * 4, dtype=torch.int32, device=HERE),
    )
    if HERE.type == "cuda":
        torch.cuda.synchronize()
    assert seen.logprobs is not None
    errors = seen.logprobs.errors()
    assert list(errors) == [1] and "4296" in str(errors[1]) and "4096" in str(errors[1])
    few, _, greedy, plain = seen.logprobs.rows()
    wanted = np.sort(logits[0].topk(7).indices.cpu().numpy())
    assert few.drawn_among is not None and few.drawn_among.tolist() == wanted.tolist()
    assert greedy.drawn_among is not None
    assert greedy.drawn_among.tolist() == [int(logits[2].argmax())]
    assert plain.drawn_among is None
