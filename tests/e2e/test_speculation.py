"""Speculation over the real runner: what the bundled model writes does not depend on it (SPC-02, SPC-06)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner import devices, runner
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.cpu_graphs import CpuGraphs
from headrace.back.runner.sizes import Buckets
from headrace.back.sampling import sampler
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.config.tree import SpeculationOptions as Speculation
from headrace.base.wire.repetition import RepetitionDetection
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.ports import AdmissionHook
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.facts import resolve_options
from tests.back.runner.test_runner import Calls

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
NGRAM = Speculation(method="ngram", num_speculative_tokens=6, prompt_lookup_min=1, adaptive=False)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, ",
    "apples and oranges, apples and oranges, apples and",
    "def f(x):\n    return x\n\ndef g(x):\n    return x\n\ndef h(x):\n",
    "Once upon a time",
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "typical_p": 0.8, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {300: 4.0, 301: -9.0}},
    {"temperature": 0.0, "bad_words": ((300,), (12, 13))},
    {"temperature": 0.0, "dry_multiplier": 0.8},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0.6, "allowed_ids": tuple(range(20, 60))},
]


@dataclass
class Answer:
    """What a request came to."""

    tokens: list[int]
    logprobs: list[Any]
    prompt: list[float] = field(default_factory=list)
    reason: str = ""
    stop_id: int | None = None


def options(speculation: Speculation | None, **changes: Any) -> EngineSpec:
    kv = {name: changes.pop(name) for name in ("kv_blocks", "prefix_caching") if name in changes}
    device = DeviceOptions(
        device=changes.pop("device", "cpu"), tensor_parallel=changes.pop("ranks", 1)
    )
    tree = Options(
        device=device,
        model=ModelOptions(max_model_len=512, deterministic=True),
        kv=KVOptions(**kv),
        scheduler=SchedulerOptions(speculative_config=speculation, **changes),
    )
    return resolve_options(tree).engine


def requests_of(
    spec: EngineSpec, count: int, lengths: tuple[int, ...] = (1, 2, 9, 40, 60)
) -> list[EngineRequest]:
    """All ways to sample, stop ids and lengths, over texts that repeat themselves."""
    assert spec.grammar is not None
    tokenizer = load_tokenizer(spec.grammar.tokenizer_path)
    rng, made = np.random.default_rng(11), []
    for id in range(count):
        prompt = tokenizer.encode_plain(TEXTS[id % len(TEXTS)])
        sampling = {"seed": id, **SAMPLINGS[id % len(SAMPLINGS)]}
        made.append(
            EngineRequest(
                id=id,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(
                    max_tokens=int(rng.choice(lengths)),
                    min_tokens=int(rng.choice([0, 1])),
                    stop_ids=tuple(
                        int(i) for i in rng.integers(0, 400, int(rng.choice([0, 3, 9])))
                    ),
                    repetition=RepetitionDetection(max_pattern_size=4, min_count=5)
                    if id % 7 == 0
                    else None,
                ),
                sampling=RowSampling(**sampling),
            )
        )
    return made


def run(core: EngineCore, requests: list[EngineRequest], at_once: int = 6) -> dict[int, Answer]:
    """Answers of requests that enter in threes while others run."""
    answers: dict[int, Answer] = defaultdict(lambda: Answer([], []))
    waiting, left = list(requests), len(requests)
    while left:
        if left - len(waiting) <= at_once - 3:
            for request in waiting[:3]:
                core.add(request)
            del waiting[:3]
        if not core.has_work:  # a grammar is being compiled
            time.sleep(core.idle_s or 0.001)
            continue
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for i, (id, token) in enumerate(
            zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True)
        ):
            answers[id].tokens.append(token)
            if batch.logprobs and batch.logprobs[i] is not None:
                answers[id].logprobs.append(batch.logprobs[i])
        for id, scores in batch.prompt_logprobs:
            answers[id].prompt += scores.values[:, 0].tolist()
        for finished in batch.finished:
            assert finished.error is None, finished.error
            answers[finished.id].reason = finished.reason
            answers[finished.id].stop_id = finished.stop_id
        left -= len(batch.finished)
    return answers


class Engine:
    """A core over an executor of its own, which is closed at the end."""

    def __init__(self, spec: EngineSpec, hooks: Sequence[AdmissionHook] = ()) -> None:
        self.spec, self.executor = spec, InlineExecutor(spec)
        self.core = EngineCore(spec, self.executor, hooks=hooks)

    @property
    def replay(self) -> CpuGraphs:
        """The recorded steps."""
        steps = self.executor._resident.runner._steps
        assert isinstance(steps, BucketSteps) and isinstance(steps._replay, CpuGraphs)
        return steps._replay


@pytest.fixture
def pair() -> Iterator[Any]:
    """Makes two engines of the same options, without and with speculation."""
    made: list[Engine] = []

    def make(**changes: Any) -> tuple[Engine, Engine]:
        made.extend(Engine(options(how, **changes)) for how in (None, NGRAM))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.executor.close()


def assert_equal(plain: dict[int, Answer], drafted: dict[int, Answer]) -> None:
    assert plain.keys() == drafted.keys()
    for id, answer in plain.items():
        other = drafted[id]
        assert other.tokens == answer.tokens, id
        assert (other.reason, other.stop_id) == (answer.reason, answer.stop_id), id
        assert len(other.logprobs) == len(answer.logprobs)
        for at, (mine, theirs) in enumerate(zip(other.logprobs, answer.logprobs, strict=True)):
            assert mine.ids.tolist() == theirs.ids.tolist() and mine.rank == theirs.rank
            where = f"request {id}, token {at} of {len(answer.tokens)}"
            np.testing.assert_allclose(mine.values, theirs.values, atol=1e-4, err_msg=where)


def test_every_way_to_sample_gives_the_tokens_of_plain_decoding(pair: Any) -> None:
    plain, drafted = pair()
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_accepted_tokens > 20 and stats.num_draft_tokens > stats.num_accepted_tokens
    assert drafted.core.counters.steps < plain.core.counters.steps


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go out with bounds, drafts are proposed and rows sampled in the step, whose sizes are
    few."""
    monkeypatch.setattr(devices, "CpuGraphs", lambda library: Calls())
    monkeypatch.setattr(devices, "ExactSizes", Buckets)
    monkeypatch.setattr(runner, "Sampler", partial(sampler.Sampler, on_device=True))


def accepted(engine: Engine) -> int:
    return engine.core.scheduler.speculation.stats.num_accepted_tokens


TURNS = pytest.mark.parametrize("turns", [1, pytest.param(2, marks=pytest.mark.slow)])
"""How often every way to sample comes."""


@pytest.mark.slow
@TURNS
def test_lengths_that_only_the_device_knows_give_the_same_tokens(
    turns: int, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    plain, drafted = pair(prefix_caching=False)
    requests = requests_of(plain.spec, turns * len(SAMPLINGS))
    assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))
    assert accepted(drafted) > 10 * turns


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.05, "frequency_penalty": -0.2},
    "penalties and logprobs": {"presence_penalty": 0.1, "frequency_penalty": 0.02, "logprobs": 7},
    "masks": {"logit_bias": {300: 2.0}, "bad_words": ((300, 301),)},
    "random": {"temperature": 0.7, "top_p": 0.9},
    "random with penalties": {"temperature": 0.5, "repetition_penalty": 0.95},
    "chosen by the host": {"dry_multiplier": 0.2, "dry_base": 1.1},
    "penalties by the host": {"frequency_penalty": -0.2, "logprobs": 30},
}


IN_GATE = ("penalties and logprobs",)


def featured(spec: EngineSpec, feature: str, *, count: int = 4) -> list[EngineRequest]:
    """Requests of which every second one asks for the feature."""
    requests = []
    for request in requests_of(spec, count, lengths=(60,)):
        asked = {"temperature": 0.0, **(FEATURES[feature] if request.id % 2 == 0 else {})}
        sampling = RowSampling(seed=request.id, **asked)
        requests.append(replace(request, sampling=sampling, stop=StopRules(max_tokens=60)))
    return requests


def assert_drafts_stand(plain: Engine, drafted: Engine, feature: str) -> None:
    """Equal tokens in fewer steps: no row that asks for the feature has voided the others' drafts,
    nor its own."""
    before = plain.core.counters.steps, drafted.core.counters.steps
    requests = featured(plain.spec, feature)
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    steps = plain.core.counters.steps - before[0], drafted.core.counters.steps - before[1]
    assert steps[1] < 0.85 * steps[0], steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in FEATURES],
)
def test_on_a_device_rows_of_every_feature_draft(
    pair: Any, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    plain, drafted = pair(prefix_caching=False)
    assert_drafts_stand(plain, drafted, feature)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("feature", FEATURES)
def test_on_a_gpu_rows_of_every_feature_draft(pair: Any, feature: str) -> None:
    plain, drafted = pair(device="cuda", prefix_caching=False)
    for _ in range(3):  # launched, recorded, replayed
        assert_drafts_stand(plain, drafted, feature)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_graphs_that_draft_and_verify_give_the_same_tokens(pair: Any) -> None:
    plain, drafted = pair(device="cuda", prefix_caching=False)
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    for _ in range(3):  # launched, recorded, replayed
        assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))
    assert accepted(drafted) > 20


@pytest.mark.slow
def test_preemption_and_chunks_change_nothing(pair: Any) -> None:
    plain, drafted = pair(kv_blocks=34, max_step_tokens=16, max_running=12, prefix_caching=False)
    requests = requests_of(plain.spec, 8, lengths=(90,))
    assert_equal(run(plain.core, requests, 40), run(drafted.core, requests, 40))
    assert drafted.core.scheduler.num_preemptions > 0
    assert drafted.core.scheduler.speculation.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_what_was_accepted_is_found_in_the_prefix_cache(pair: Any) -> None:
    """A conversation that goes on: the second prompt is the first with its answer."""
    plain, drafted = pair()
    first = requests_of(plain.spec, 2)[0]
    first = EngineRequest(
        id=1, prompt=first.prompt, stop=StopRules(max_tokens=60), sampling=first.sampling
    )
    answers = [run(engine.core, [first])[1] for engine in (plain, drafted)]
    assert answers[0].tokens == answers[1].tokens
    prompt = first.prompt + np.asarray(answers[0].tokens[:-1], "<i4").tobytes()
    second = EngineRequest(
        id=2, prompt=prompt, stop=StopRules(max_tokens=20), sampling=first.sampling
    )
    hits = []
    for engine in (plain, drafted):
        before = engine.core.kv.num_hits
        hits.append((run(engine.core, [second])[2].tokens, engine.core.kv.num_hits - before))
    assert hits[0] == hits[1] and hits[0][1] >= len(prompt) // 4 - 2 * 16


def test_steps_that_verify_are_recorded_whole(pair: Any) -> None:
    _, drafted = pair()
    prompt = np.asarray([5, 6, 7, 8] * 12, "<i4").tobytes()
    for id in range(3):
        stop, sampling = StopRules(max_tokens=60), RowSampling(temperature=0.0)
        run(drafted.core, [EngineRequest(id=id, prompt=prompt, stop=stop, sampling=sampling)])
    assert drafted.replay.foreign == ()
    assert any(bucket.verifies for bucket in drafted.replay._graphs)


@pytest.mark.slow
def test_rows_with_penalties_draft_and_keep_their_tokens(pair: Any) -> None:
    """In `make test`: on a device, with penalties and logprobs."""
    plain, drafted = pair()
    requests = []
    for request in requests_of(plain.spec, 8, lengths=(60,)):
        sampling = RowSampling(
            temperature=(0.0, 0.6)[request.id % 2],
            seed=request.id,
            repetition_penalty=(1.05, 0.9)[request.id // 4],
            presence_penalty=0.1,
            frequency_penalty=(0.02, -0.3)[request.id // 2 % 2],
            logprobs=2,
        )
        stop = StopRules(max_tokens=60)
        requests.append(
            EngineRequest(id=request.id, prompt=request.prompt, stop=stop, sampling=sampling)
        )
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20


def test_a_predicted_answer_is_verified_many_tokens_at_a_time(pair: Any) -> None:
    """The drafts are the prediction from its first token on; where it is wrong it costs steps."""
    plain, drafted = pair()
    stop, sampling = StopRules(max_tokens=48), RowSampling(temperature=0.0)
    prompt = requests_of(plain.spec, 5)[4].prompt
    request = EngineRequest(id=0, prompt=prompt, stop=stop, sampling=sampling)
    expected = run(plain.core, [request])[0]
    right = np.asarray(expected.tokens, "<i4")
    wrong = right.copy()
    wrong[10:] = (wrong[10:] + 1) % 400
    steps, finished = {}, {}
    for id, prediction in enumerate((right, wrong, right[:0])):
        before = drafted.core.counters.steps
        predicted = replace(request, id=id, prediction=prediction.tobytes())
        drafted.core.add(predicted)
        tokens: list[int] = []
        while drafted.core.has_work:
            batch = drafted.core.step(wait=True).tokens
            if batch is not None:
                tokens += batch.tokens.tolist()
                finished |= {end.id: end for end in batch.finished}
        assert tokens == expected.tokens
        steps[id] = drafted.core.counters.steps - before
    assert steps[0] < steps[1] <= steps[2]
    assert steps[0] <= 16
    assert finished[0].num_accepted >= 32
    assert finished[1].num_accepted < finished[1].num_drafted
    assert finished[2].num_drafted == 0


@pytest.mark.slow
def test_a_prediction_ends_where_the_row_needs_its_place(pair: Any) -> None:
    """A long prompt, and a prediction that does not fit behind the answer."""
    plain, drafted = pair()
    prompt = np.tile(np.arange(5, 45), 11).astype("<i4")
    stop, sampling = StopRules(max_tokens=60), RowSampling(temperature=0.0)
    request = EngineRequest(id=0, prompt=prompt.tobytes(), stop=stop, sampling=sampling)
    predicted = replace(request, prediction=np.arange(5, 405).astype("<i4").tobytes())
    assert run(plain.core, [request])[0].tokens == run(drafted.core, [predicted])[0].tokens


@pytest.mark.slow
@TURNS
def test_earlier_requests_draft_for_those_that_ask_again(turns: int) -> None:
    """By method suffix: all ways to sample give the tokens of plain decoding, and a second round of the same requests
    has more drafts that stand (SPC-06)."""
    how = Speculation(method="suffix", adaptive=False, num_speculative_tokens=8)
    engines = [Engine(options(one, prefix_caching=False)) for one in (None, how)]
    try:
        plain, drafted = engines
        requests = requests_of(plain.spec, turns * len(SAMPLINGS))
        expected = run(plain.core, requests)
        steps = []
        for _ in range(2):
            before = drafted.core.scheduler.speculation.stats.num_accepted_tokens
            assert_equal(expected, run(drafted.core, requests))
            steps.append(drafted.core.scheduler.speculation.stats.num_accepted_tokens - before)
        assert steps[1] > 1.5 * steps[0] > 0, steps
    finally:
        for engine in engines:
            engine.executor.close()
