"""The runner gives every request what it would get alone, whatever the split, the order and the company."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.linear_top.op import NUM_CANDIDATES
from headrace.back.runner import devices
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.cpu_graphs import CpuGraphs
from headrace.back.runner.devices import StepsFactory, bucket_steps, make_steps
from headrace.back.runner.replay import DeferredSampling
from headrace.back.runner.results import PassedEvent, StepEvent, StepTensors
from headrace.back.runner.runner import Runner
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.start import start_runner
from headrace.back.runner.steps import StepResources, Steps
from headrace.back.sampling import logprobs as scoring
from headrace.back.sampling.in_step import InStepSampling
from headrace.back.sampling.sampler import Sampler
from headrace.base.config.resolved import Decision, EngineSpec
from headrace.base.errors import CheckpointError
from headrace.base.wire.grammar import GRAMMAR_HOOK, pack_masks
from headrace.base.wire.request import RowSampling
from tests.back.driver import GREEDY, Driver, Sequence, greedy_reference, reference_logits
from tests.back.tiny_model import TinyModel, tiny_spec

CPU = torch.device("cpu")


class Calls:
    """Replays a bucket's step by calling it: the device's way of running steps, without a device."""

    on_host = False
    decisions: tuple[Decision, ...] = ()
    num_graphs = 0
    num_bytes = 0

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def follow(self) -> None:
        pass

    def compiling(self) -> None:
        return None

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        tensors = step(bucket)
        return tensors if rest is None else rest(bucket, tensors)

    def wants(self, bucket: Bucket) -> bool:
        return False

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        raise AssertionError("it wants none")

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def event(self) -> StepEvent:
        return PassedEvent()


def by_buckets(resources: StepResources, spec: EngineSpec, *, num_groups: int) -> Steps:
    return bucket_steps(resources, spec, Calls(), num_groups=num_groups)


@pytest.fixture(params=["exact", "buckets", "drawn"], autouse=True)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file runs every way of running steps (ENG-21): exact ones, buckets, and buckets that draw
    random rows themselves, as on a GPU."""
    made = make_steps if request.param == "exact" else by_buckets
    monkeypatch.setattr("tests.back.runner.test_runner.STEPS", made)
    if request.param == "drawn":
        sampler = partial(Sampler, on_device=True)
        monkeypatch.setattr("headrace.back.runner.runner.Sampler", sampler)


STEPS: StepsFactory = make_steps


def make(model: TinyModel, **options: int) -> tuple[Runner, Driver]:
    options = {"max_step_tokens": 400, **options}
    runner = start_runner(tiny_spec(**options), model, device=CPU, steps=STEPS).runner
    return runner, Driver(runner.facts)


def random_prompt(rng: np.random.Generator, low: int = 1, high: int = 40) -> list[int]:
    return rng.integers(0, 61, rng.integers(low, high)).tolist()


def random_run(
    rng: np.random.Generator, active: list[Sequence], budget: int
) -> list[tuple[Sequence, int]]:
    """Some of the sequences, each with a random piece of what it has left."""
    runs = []
    for sequence in rng.permutation(np.array(active, dtype=object)):
        left = sequence.length - sequence.num_computed
        if left < 1 or rng.random() < 0.25 or len(runs) == budget:
            continue
        runs.append((sequence, int(rng.integers(1, left + 1)) if rng.random() < 0.5 else left))
    return runs


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [(None, None), (12, None, 12), (None, 5, 9, 5, None)])
def test_random_splits_preemptions_and_row_reuse_give_each_request_its_solo_tokens(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    """ENG-21, REG-021, REG-022: any chunking, any batch mix, recompute after preemption, overlap of one step."""
    rng = np.random.default_rng(seed)
    model = TinyModel(windows)
    runner, driver = make(model, num_blocks=400)
    waiting = [driver.add(random_prompt(rng), request=i) for i in range(14)]
    active: list[Sequence] = []
    done: list[Sequence] = []
    unread = []
    while waiting or active:
        while waiting and len(active) < 5:
            active.append(waiting.pop())
        runs = random_run(rng, active, 8)
        if runs:
            unread.append(runner.execute(driver.plan(runs)))
        if len(unread) > 1 or not runs:
            while unread:
                driver.read(unread.pop(0))
        for sequence in list(active):
            if sequence.unknown:
                continue
            if len(sequence.outputs) >= 6:
                driver.release(sequence)
                active.remove(sequence)
                done.append(sequence)
            elif sequence.started and rng.random() < 0.1:
                driver.release(sequence)
    assert len(done) == 14
    for sequence in done:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.outputs == greedy_reference(model, prompt, len(sequence.outputs))


def test_a_row_whose_logits_are_not_finite_fails_alone_and_leaves_clean_blocks() -> None:
    """Reliability 1.15: bystanders unchanged, the failed row's blocks usable by their next owner."""
    model = TinyModel()
    runner, driver = make(model)
    model.poison = 60
    bystanders = [driver.add([7, 8, 9]), driver.add([3] * 11)]
    bad = driver.add([1, 2, 60, 4])
    driver.read(runner.execute(driver.plan([(s, s.length) for s in [*bystanders, bad]])))
    assert bad.error == "NonFiniteLogits"
    assert all(bool(torch.isfinite(kv).all()) for kv in runner._kv.tensors)
    driver.release(bad)
    reuse = driver.add([30, 31, 32])
    driver.read(runner.execute(driver.plan([(reuse, 3), *((s, 1) for s in bystanders)])))
    clean = TinyModel()
    assert reuse.outputs == greedy_reference(clean, [30, 31, 32], 1)
    assert bystanders[0].outputs == greedy_reference(clean, [7, 8, 9], 2)
    assert bystanders[1].outputs == greedy_reference(clean, [3] * 11, 2)


MASKED = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.0, logit_bias={3: 0.5, 40: -2.0, 60: 0.25}),
    RowSampling(temperature=0.0, allowed_ids=(1, 7, 30, 31, 32, 33, 59)),
    RowSampling(temperature=0.0, min_tokens=4, suppressed_ids=tuple(range(20))),
    RowSampling(temperature=0.0, bad_words=tuple((i,) for i in range(30, 50))),
]
RANDOM = [
    RowSampling(temperature=0.9, seed=2, logit_bias={5: 1.0}, presence_penalty=0.7),
    RowSampling(temperature=0.7, seed=4, allowed_ids=tuple(range(0, 61, 3)), logprobs=2),
    RowSampling(temperature=1.1, seed=5, bad_words=((1,), (2, 2)), top_k=20),
]


def masked_run(runner: Runner, kinds: list[RowSampling]) -> list[list[int]]:
    """Rows of every kind, two of them with masks of a grammar in two of three steps, which are sent
    when the step asks for them."""
    driver = Driver(runner.facts)
    rng = np.random.default_rng(7)
    rows = [driver.add([5, 3, 8, i], kinds[i % len(kinds)], request=i) for i in range(8)]
    unread = []
    for step in range(12):
        plan = driver.plan([(row, row.length - row.num_computed) for row in rows])
        bits = rng.integers(-(2**31), 2**31, (2, 2)).astype(np.int32)

        payload = pack_masks(np.array([rows[0].row, rows[4].row], np.int32), bits)
        deferred = (GRAMMAR_HOOK,) if step % 3 else ()
        plan = msgspec.structs.replace(plan, deferred=deferred)
        unread.append(runner.launch(plan, lambda number, masks=payload: {GRAMMAR_HOOK: masks}))
        if len(unread) > 1:
            driver.read(unread.pop(0).result())
    driver.read(unread.pop(0).result())
    assert all(row.error is None for row in rows)
    return [row.outputs for row in rows]


@pytest.mark.parametrize("kinds", [MASKED, MASKED + RANDOM], ids=["greedy", "random"])
def test_masks_in_recorded_steps_give_the_tokens_of_the_host(
    kinds: list[RowSampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-26: masks that come late, biases, banned words and allowed ids, whatever runs the
    steps."""
    runner, _ = make(TinyModel(), num_blocks=200)
    calls: list[bool] = []
    take_masks = runner._sampler.take_masks
    monkeypatch.setattr(
        runner._sampler, "take_masks", lambda *masks: (calls.append(True), take_masks(*masks))
    )
    tokens = masked_run(runner, kinds)
    recorded = isinstance(runner._steps, BucketSteps)
    within = recorded and (kinds is MASKED or runner._sampler.device_rows is not None)
    assert bool(calls) == within
    if recorded and isinstance(runner._steps._replay, CpuGraphs):
        assert runner._steps._replay.num_graphs and not runner._steps._replay.foreign
    monkeypatch.setattr(devices, "why_exact", lambda resources: "for the test")
    monkeypatch.setattr("headrace.back.runner.runner.Sampler", Sampler)
    exact = start_runner(
        tiny_spec(max_step_tokens=400, num_blocks=200), TinyModel(), device=CPU, steps=make_steps
    ).runner
    assert tokens == masked_run(exact, kinds)


def test_damaged_weights_are_refused_at_start() -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        make(TinyModel(damaged=True))


def test_a_step_without_rows_applies_its_changes() -> None:
    model = TinyModel()
    runner, driver = make(model)
    first = driver.add([1, 2, 3])
    driver.read(runner.execute(driver.plan([(first, 3)])))
    driver.release(first)
    result = runner.execute(driver.plan([]))
    assert result.tokens.size == 0 and GREEDY.greedy


@pytest.mark.parametrize("seed", range(4))
def test_prompt_logprobs_join_without_gap_at_every_split(seed: int) -> None:
    """REG-022, REG-024: chunks of any size beside rows that ask for nothing."""
    rng = np.random.default_rng(seed)
    model = TinyModel((None, 7))
    runner, driver = make(model, num_blocks=200)
    asks = RowSampling(temperature=0.0, prompt_logprobs=4, logprob_ids=(3,), logprobs=2)
    scored = [driver.add(random_prompt(rng), asks) for _ in range(3)]
    plain = [driver.add(random_prompt(rng)) for _ in range(3)]
    while any(not s.outputs for s in scored):
        runs = random_run(rng, [*scored, *plain], 8)
        if runs:
            driver.read(runner.execute(driver.plan(runs)))
    assert not any(s.prompt_logprobs or s.logprobs for s in plain)
    for sequence in scored:
        logprobs = reference_logits(model, sequence.tokens).log_softmax(-1)
        prompt = sequence.tokens[: sequence.num_prompt]
        at = 1
        for part in sequence.prompt_logprobs:
            assert part.start == at
            for ids, values, rank in zip(part.ids, part.values, part.ranks, strict=True):
                row = logprobs[at - 1]
                top = row.topk(4).indices.tolist()
                assert ids.tolist() == [prompt[at], *top, 3]
                np.testing.assert_allclose(values, row[ids.astype(np.int64)], atol=1e-4)
                assert rank == 1 + int((row > row[prompt[at]]).sum())
                at += 1
        assert at == max(1, len(prompt))
        assert len(sequence.logprobs) == len(sequence.outputs)


def test_seeded_sampling_survives_chunking_preemption_and_company() -> None:
    """ENG-25, P17: noise by position: the same tokens alone, and in a crowd with preemptions."""
    model = TinyModel()
    sampling = [
        RowSampling(seed=3, temperature=1.2, frequency_penalty=0.5),
        RowSampling(seed=4, top_k=7, repetition_penalty=1.2, dry_multiplier=0.5),
        RowSampling(seed=5, top_p=0.8, bad_words=((5,), (1, 2)), min_tokens=4, suppressed_ids=(0,)),
        RowSampling(seed=6, allowed_ids=tuple(range(9)), presence_penalty=1.0),
        RowSampling(seed=7, temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
        RowSampling(seed=8, temperature=1.5),
    ]

    def generate(which: list[int], *, preempt: bool) -> list[list[int]]:
        rng = np.random.default_rng(8)
        runner, driver = make(model, num_blocks=200)
        sequences = [driver.add([i, 5, 9, 5, 9], sampling[i]) for i in which]
        while any(len(s.outputs) < 14 for s in sequences):
            for s in sequences:
                if preempt and s.started and rng.random() < 0.2:
                    driver.release(s)
            runs = random_run(rng, [s for s in sequences if len(s.outputs) < 14], 8)
            if runs:
                driver.read(runner.execute(driver.plan(runs)))
        return [s.outputs for s in sequences]

    alone = [generate([i], preempt=False)[0] for i in range(6)]
    crowd = [2, 5, 0, 3, 4, 1]
    assert generate(crowd, preempt=True) == [alone[i] for i in crowd]
    assert generate([5, 4], preempt=True) == [alone[5], alone[4]]
    assert all(token < 9 for token in alone[3])


LOGPROBS = [
    RowSampling(seed=1, temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.5),
    RowSampling(temperature=0.0, logprobs=3),
    RowSampling(seed=2, top_k=9, presence_penalty=1.0, logprobs=11),
    RowSampling(temperature=0.0),
    RowSampling(seed=4, temperature=0.9, logprobs=0),
    RowSampling(temperature=0.0, repetition_penalty=0.6, logprobs=20),
    RowSampling(temperature=0.0, logprobs=2, logprob_ids=(3, 4)),
]
"""The last is beyond what steps do: beside it the sampler takes the others' rows too."""


@pytest.mark.parametrize("steps", ["drawn"], indirect=True)
def test_rows_are_told_the_same_by_steps_that_sample_as_by_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ENG-07, ENG-21, ENG-26: beside chunks and through preemptions, with results read three steps late and kept while
    the ring goes round."""
    model = TinyModel()

    def generate(runner: Runner) -> list[Sequence]:
        rng, driver, launched = np.random.default_rng(4), Driver(runner.facts), []
        rows = [
            driver.add(random_prompt(rng, high=9), LOGPROBS[i % len(LOGPROBS)]) for i in range(8)
        ]
        while any(len(row.outputs) < 20 for row in rows):
            for row in rows:
                if row.started and not row.unknown and rng.random() < 0.02:
                    driver.release(row)
            left = [row for row in rows if len(row.outputs) + row.unknown < 20]
            if runs := random_run(rng, left, 8):
                launched.append(runner.launch(driver.plan(runs)))
            while len(launched) > 3 or (launched and not runs):
                driver.read(launched.pop(0).result())
        return rows

    runner, _ = make(model, num_blocks=300)
    ours = generate(runner)
    ways = {bucket.sampler_input for bucket in runner._steps._frames}
    kinds = {
        (way.penalties > 0, way.alternatives) for way in ways if isinstance(way, InStepSampling)
    }
    assert kinds >= {(True, None), (True, 5), (True, 20)}, kinds
    monkeypatch.setattr("headrace.back.runner.runner.Sampler", Sampler)
    spec = tiny_spec(max_step_tokens=400, num_blocks=300)
    theirs = generate(start_runner(spec, model, device=CPU, steps=make_steps).runner)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs == other.outputs and mine.error is other.error is None
        assert len(mine.logprobs) == len(other.logprobs)
        for scores, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            assert scores.ids.tolist() == wanted.ids.tolist() and scores.rank == wanted.rank
            np.testing.assert_allclose(scores.values, wanted.values, atol=1e-5)


class Topped(TinyModel):
    """Says the best tokens of each row; whole numbers, so that there are ties, and rows that prove nothing."""

    told: torch.Tensor | None = None
    num_logprobs = num_again = 0

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        self.num_again += self.told is not None
        return (super().logits(hidden_NE) * 1.5).round()

    def top_candidates(self, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.told = None
        values, ids = self.logits(hidden_NE).sort(dim=1, descending=True, stable=True)
        self.num_logprobs += 1
        self.told = ids[:, :NUM_CANDIDATES].contiguous()
        return self.told, values[:, :NUM_CANDIDATES].contiguous()

    def forward(self, batch: Batch) -> torch.Tensor:
        self.told = None
        return super().forward(batch)


@pytest.mark.parametrize("steps", ["buckets"], indirect=True)
def test_rows_drawn_from_their_best_tokens_survive_chunking_preemption_and_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ENG-25, P17: also those whose logits are computed after all, and beside greedy ones."""
    sampling = [
        RowSampling(temperature=0.0),
        RowSampling(seed=4, top_k=7),
        RowSampling(seed=5, top_k=20, top_p=0.9, temperature=2.0),
        RowSampling(seed=6, top_k=23, min_p=0.02),
    ]

    def generate(model: Topped) -> list[list[int]]:
        rng = np.random.default_rng(8)
        runner, driver = make(model, num_blocks=200)
        sequences = [driver.add([i, 5, 9, 5, 9], sampling[i % 4]) for i in range(8)]
        while any(len(s.outputs) < 40 for s in sequences):
            for s in sequences:
                if s.started and rng.random() < 0.02:
                    driver.release(s)
            runs = random_run(rng, [s for s in sequences if len(s.outputs) < 40], 8)
            if runs:
                driver.read(runner.execute(driver.plan(runs)))
        return [s.outputs for s in sequences]

    topped, whole = Topped(width=97), Topped(width=97)
    monkeypatch.setattr(whole, "top_candidates", None)
    assert generate(topped) == generate(whole)
    assert topped.num_logprobs > 20 and topped.num_again > 5 and whole.num_logprobs == 0


def test_prompt_logprobs_beyond_what_is_made_fail_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused by the number of scores, before one is made; the limit is small here, so that the prompt may be."""
    monkeypatch.setattr(scoring, "LARGEST", 400)
    model = TinyModel()
    runner, driver = make(model)
    width = runner.facts.logits_width
    fits = driver.add([1, 2], RowSampling(temperature=0.0, prompt_logprobs=-1))
    named = driver.add([5] * 8, RowSampling(temperature=0.0, prompt_logprobs=width + 9))
    whole = driver.add([5] * 8, RowSampling(temperature=0.0, prompt_logprobs=-1))
    plain = driver.add([3, 4, 5])
    for counts in ((2, 4, 4, 3), (1, 4, 4, 1)):
        runs = zip((fits, named, whole, plain), counts, strict=True)
        driver.read(runner.execute(driver.plan(list(runs))))
    assert whole.error == named.error == "InvalidRequest" and not whole.outputs
    assert not whole.prompt_logprobs and not named.prompt_logprobs
    assert fits.prompt_logprobs[0].ids.shape == (1, 1 + width)
    assert plain.outputs == greedy_reference(model, [3, 4, 5], 2)


def test_the_facts_name_the_samplers_kernels() -> None:
    runner, _ = make(TinyModel())
    fields = [field for field, *_ in runner.facts.decisions]
    assert fields[:3] == ["kernel.greedy", "kernel.gumbel", "kernel.nucleus"]


class Counting(TinyModel):
    """Counts the tokens that go in, and the hidden states that come out."""

    counts: tuple[int, int] = (0, 0)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        self.counts = len(batch.token_ids_T), len(hidden)
        return hidden


@pytest.mark.parametrize("steps", ["buckets"], indirect=True)
def test_only_each_rows_last_token_passes_the_last_layer_unless_somebody_wants_more() -> None:
    model = Counting()
    runner, driver = make(model)
    max_rows = runner.facts.max_rows

    def run(sequence: Sequence, count: int) -> tuple[int, int]:
        driver.read(runner.execute(driver.plan([(sequence, count)])))
        return model.counts

    plain = driver.add(list(range(40)), GREEDY)
    assert [run(plain, 30), run(plain, 10)] == [(32, max_rows), (16, max_rows)]
    assert run(plain, 1) == (1, 1)
    scored = driver.add(list(range(40)), RowSampling(temperature=0.0, prompt_logprobs=1))
    assert [run(scored, 30), run(scored, 10)] == [(32, 32), (16, 16)]
    driver.release(scored)
    assert run(driver.add(list(range(30)), GREEDY), 30) == (32, max_rows)
