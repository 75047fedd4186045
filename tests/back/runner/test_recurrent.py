"""ENG-22, ENG-24: recurrent state by row, through the core and the runner: however a request is
chunked, preempted, continued from a snapshot or put in another's row, it gives what it gives alone.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch

from headrace.back.attention.forms import CacheForm, HeadsForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.embedding.op import OP as EMBEDDING
from headrace.back.kernels.embedding.op import EmbeddingProblem
from headrace.back.kernels.gated_scan.op import OP as GATED_SCAN
from headrace.back.kernels.gated_scan.op import GatedScanProblem, ScanRows
from headrace.back.kernels.linear.op import OP as LINEAR
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner.batch import Rows
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.cpu_graphs import CpuGraphs
from headrace.back.runner.devices import bucket_steps, make_steps
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.results import LaunchedStep, PassedEvent
from headrace.back.runner.runner import Runner
from headrace.back.runner.start import start_runner
from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import StepPlan
from headrace.core.core import EngineCore
from tests.back.tiny_model import HEAD_DIM, HEADS, HIDDEN, WIDTH, TinyModel, tiny_spec
from tests.core.harness import Clock, Driver, make_request

CPU = torch.device("cpu")
BLOCK = 8


class RecurrentModel(TinyModel):
    """Two gated linear recurrences, between them an attention layer if `attends`."""

    state = "recurrent"

    def __init__(self, *, attends: bool, device: torch.device = CPU) -> None:
        super().__init__((None,) if attends else (), seed=3)
        g = torch.Generator().manual_seed(8)
        self.attends = attends
        self.host_kernels = ("attention in plain torch",) if attends else ()
        first = int(attends)
        forms: list[CacheForm] = [StateForm(cache=first + i, shape=(HIDDEN,)) for i in range(2)]
        if attends:
            forms.append(HeadsForm(cache=0, kv_heads=HEADS, head_dim=HEAD_DIM))
        self.kv_forms = tuple(forms)
        self.gates, self.ins, self.outs = (
            torch.randn(2, HIDDEN, HIDDEN, generator=g).to(device) / math.sqrt(HIDDEN) * size
            for size in (2.0, 1.5, 1.5)
        )
        self.embed, self.place, self.head = (
            tensor.to(device) for tensor in (self.embed, self.place, self.head)
        )
        self.scan = GATED_SCAN.choose(GatedScanProblem(device=device.type)).bind()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E], or [N, E] where the batch has a last-token batch."""
        plan, first = batch.plans[0], int(self.attends)
        assert batch.row_R is not None
        rows = ScanRows(
            row_R=batch.row_R,
            query_start_R1=plan.query_start_R1,
            decode=plan.max_query_len == 1,
            trail=batch.trail,
        )
        x_TE = self.embed[batch.token_ids_T]
        for i in range(2):
            gate_TE = (x_TE @ self.gates[i]).sigmoid()
            y_TE = self.scan(gate_TE, x_TE @ self.ins[i], batch.kv[first + i], rows)
            x_TE = x_TE + y_TE.tanh() @ self.outs[i]
            if self.attends and i == 0:
                q = self._query(0, x_TE, batch)
                x_TE = x_TE + self._attend(0, q, batch.plans[batch.group_of_layer[0]], batch.kv[0])
        return x_TE if batch.last_token_batch is None else x_TE[batch.logits_at_N]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The answer of this prompt alone: no runner, no cache, the recurrences written out."""
        tokens = list(prompt)
        for _ in range(count):
            x_TE = self.embed[torch.tensor(tokens, device=self.embed.device)]
            for i in range(2):
                gate_TE, in_TE = (x_TE @ self.gates[i]).sigmoid(), x_TE @ self.ins[i]
                y_E, ys = torch.zeros_like(in_TE[0]), []
                for gate_E, in_E in zip(gate_TE, in_TE, strict=True):
                    y_E = gate_E * y_E + (1 - gate_E) * in_E
                    ys.append(y_E)
                x_TE = x_TE + torch.stack(ys).tanh() @ self.outs[i]
                if self.attends and i == 0:
                    x_TE = x_TE + self._attend_all(x_TE)
            tokens.append(int((x_TE[-1] @ self.head.T).argmax()))
        return tokens[len(prompt) :]

    def _attend_all(self, x_TE: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x_TE @ weight.T).unflatten(1, (HEADS, HEAD_DIM)) for weight in self.qkv[0])
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.out[0].T


class KernelsAlone(RecurrentModel):
    """One recurrence between a lookup and a product, all of them kernels: a step of it can be recorded."""

    def __init__(self) -> None:
        super().__init__(attends=False)
        self.kv_forms = self.kv_forms[:1]
        new = {"device": "cpu", "dtype": torch.float32}
        self.tables = ((self.embed @ self.gates[0]).sigmoid(), self.embed @ self.ins[0])
        table = EmbeddingProblem(**new, rows=WIDTH, width=HIDDEN)
        self.lookups = [EMBEDDING.choose(table).bind(one) for one in self.tables]
        head = LinearProblem(**new, inputs=HIDDEN, outputs=WIDTH, wide=True)
        self.project = LINEAR.choose(head).bind(self.head.clone(), None)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E], or [N, E] where the batch has a last-token batch."""
        assert batch.row_R is not None
        starts_R1, decode = batch.plans[0].query_start_R1, batch.plans[0].max_query_len == 1
        rows = ScanRows(
            row_R=batch.row_R, query_start_R1=starts_R1, decode=decode, trail=batch.trail
        )
        gate_TE, x_TE = (lookup(batch.token_ids_T) for lookup in self.lookups)
        y_TE = self.scan(gate_TE, x_TE, batch.kv[0], rows)
        return y_TE if batch.last_token_batch is None else y_TE[batch.logits_at_N]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V]."""
        return self.project(hidden_NE)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """See RecurrentModel."""
        tokens, y_E = list(prompt), torch.zeros(HIDDEN)
        for place in range(len(prompt) + count - 1):
            gate_E, in_E = (table[tokens[place]] for table in self.tables)
            y_E = gate_E * y_E + (1 - gate_E) * in_E
            if place >= len(prompt) - 1:
                tokens.append(int((self.head @ y_E).argmax()))
        return tokens[len(prompt) :]


class RunnerPending:
    """A step of the runner, as the core waits for it."""

    def __init__(self, launched: LaunchedStep) -> None:
        self._launched = launched

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> Any:
        return self._launched.result()


class RunnerExecutor:
    """The runner as the core's executor, in this thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.facts = runner, runner.facts

    def submit(self, plan: StepPlan) -> RunnerPending:
        return RunnerPending(self.runner.launch(plan))

    def check(self) -> None:
        """It lives with the core."""


class RunnerDriver(Driver):
    """The core's driver over a runner."""

    def __init__(self, runner: Runner, spec: Any, **scheduler: Any) -> None:
        self.clock = Clock()
        settings = msgspec.structs.replace(spec.scheduler, **scheduler)
        self.core = EngineCore(
            msgspec.structs.replace(spec, scheduler=settings),
            RunnerExecutor(runner),
            clock=self.clock,
        )
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.prompt_scores, self.cached = defaultdict(list), []
        self.queued = []
        self.finished, self.replies = {}, {}
        self.queued = []
        self.num_steps = self._calls = 0


def spec_of(*, prefix_caching: bool = True, num_bytes: int = 1 << 16) -> Any:
    spec = tiny_spec()
    kv = msgspec.structs.replace(
        spec.kv, prefix_caching=prefix_caching, num_blocks=None, memory_bytes=num_bytes
    )
    return msgspec.structs.replace(spec, kv=kv)


def exact_steps(resources: Any, spec: Any, *, num_groups: int) -> ExactSteps:
    """Steps of exactly their size, whatever the device could record."""
    rows = Rows.growing(
        max_rows=spec.scheduler.max_running,
        num_groups=num_groups,
        block_tokens=spec.kv.block_tokens,
        device=resources.device,
    )
    return ExactSteps(resources, rows)


class Called:
    """A replay that records nothing and pads as a GPU's does."""

    decisions = ()
    on_host = True
    num_graphs = num_bytes = 0

    def wants(self, bucket: Any) -> bool:
        return False

    def scope(self) -> Any:
        return nullcontext()

    def follow(self) -> None:
        """One order of work."""

    def compiling(self) -> None:
        """Nothing to compile."""

    def run(self, bucket: Any, step: Any, rest: Any = None) -> Any:
        return step(bucket) if rest is None else rest(bucket, step(bucket))

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The host reads the ring itself."""

    def event(self) -> Any:
        return PassedEvent()


def padded_steps(resources: Any, spec: Any, *, num_groups: int) -> Any:
    return bucket_steps(resources, spec, Called(), num_groups=num_groups)


def requests_of(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    shared = [[rng.randrange(WIDTH) for _ in range(40)] for _ in range(2)]
    return [
        make_request(
            id,
            rng.choice(shared)[: rng.choice([0, 8, 16, 30, 40])]
            + [rng.randrange(WIDTH) for _ in range(rng.choice([1, 5, 8, 16]))],
            max_tokens=rng.choice([1, 4, 8]),
        )
        for id in range(1, 9)
    ]


def prompt_of(request: EngineRequest) -> list[int]:
    return [int(token) for token in memoryview(request.prompt).cast("i")]


WAYS = {"exact": exact_steps, "padded": padded_steps, "cpu graphs": make_steps}


@pytest.mark.parametrize(
    ("way", "attends", "chunk", "running", "overlap", "prefix_caching"),
    [
        ("exact", False, 64, 8, True, True),
        ("exact", True, 7, 3, True, True),
        ("exact", True, 5, 8, True, False),
        ("padded", False, 7, 8, True, True),
        ("padded", True, 24, 8, False, True),
        ("cpu graphs", False, 64, 8, True, True),
    ],
)
def test_a_request_gives_what_it_gives_alone(
    way: str, attends: bool, chunk: int, running: int, overlap: bool, prefix_caching: bool
) -> None:
    """Chunks, rows that change hands, snapshots and padding change nothing."""
    model, spec = RecurrentModel(attends=attends), spec_of(prefix_caching=prefix_caching)
    runner = start_runner(spec, model, device=CPU, steps=WAYS[way]).runner
    driver = RunnerDriver(runner, spec, max_step_tokens=chunk, max_running=running, overlap=overlap)
    requests = requests_of(chunk)
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        count = request.stop.max_tokens
        assert driver.tokens[request.id] == model.greedy(prompt_of(request), count), request.id
    driver.assert_at_rest()
    assert (driver.core.kv.num_hits > 0) == prefix_caching


def test_a_preempted_request_is_computed_again_from_its_last_snapshot() -> None:
    model, spec = RecurrentModel(attends=True), spec_of(num_bytes=14_000)
    runner = start_runner(spec, model, device=CPU).runner
    driver = RunnerDriver(runner, spec)
    prompts = {id: [(id * 7 + i) % WIDTH for i in range(17)] for id in (1, 2, 3)}
    for id, prompt in prompts.items():
        driver.add(make_request(id, prompt, max_tokens=20))
    driver.run()
    for id, prompt in prompts.items():
        assert driver.tokens[id] == model.greedy(prompt, 20)
    assert driver.core.scheduler.num_preemptions > 0
    driver.assert_at_rest()


def test_the_next_turn_begins_from_a_snapshot() -> None:
    model, spec = RecurrentModel(attends=False), spec_of()
    runner = start_runner(spec, model, device=CPU).runner
    driver = RunnerDriver(runner, spec)
    prompt = [(7 * i) % WIDTH for i in range(37)]
    for id, length in enumerate((37, 37, 35), start=1):
        driver.add(make_request(id, prompt[:length], max_tokens=4))
        driver.run()
        assert driver.tokens[id] == model.greedy(prompt[:length], 4)
    assert [driver.finished[id].num_cached for id in (1, 2, 3)] == [0, 32, 32]


def test_a_row_begins_afresh_whatever_its_owner_before_left() -> None:
    model, spec = RecurrentModel(attends=False), spec_of(prefix_caching=False)
    runner = start_runner(spec, model, device=CPU, steps=padded_steps).runner
    runner._kv.state.fill_(0xFF)  # NaN in every channel
    driver = RunnerDriver(runner, spec)
    driver.add(make_request(1, [5, 6, 7], max_tokens=5))
    driver.run()
    assert driver.tokens[1] == model.greedy([5, 6, 7], 5)


def test_prompts_whose_sizes_the_model_wants_are_launched_by_themselves() -> None:
    """A prompt of three tokens is padded to a size, one of eight has its own on the host."""
    seen: list[tuple[int, bool]] = []

    class Asking(RecurrentModel):
        host_pairs = 8 * 8

        def forward(self, batch: Batch) -> torch.Tensor:
            seen.append((len(batch.token_ids_T), batch.plans[0].host_kv_len is not None))
            return super().forward(batch)

    model, spec = Asking(attends=True), spec_of()
    runner = start_runner(spec, model, device=CPU, steps=padded_steps).runner
    driver = RunnerDriver(runner, spec)
    for id, prompt in enumerate(([5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8])):
        seen.clear()
        driver.add(make_request(id, prompt, max_tokens=4))
        driver.run()
        assert driver.tokens[id] == model.greedy(prompt, 4)
        assert [size for size, on_host in seen if on_host] == ([] if id == 0 else [8])


def test_a_step_without_memory_is_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran of it has changed the state of its rows."""
    model, spec, failures = RecurrentModel(attends=False), spec_of(), [1]
    runner = start_runner(spec, model, device=CPU).runner
    driver = RunnerDriver(runner, spec)
    forward = model.forward

    def full(batch: Batch) -> torch.Tensor:
        hidden_TE = forward(batch)
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("made up")
        return hidden_TE

    monkeypatch.setattr(model, "forward", full)
    driver.add(make_request(1, [5, 6, 7], max_tokens=5))
    driver.run()
    assert driver.finished[1].reason == "error" and not driver.tokens[1]
    driver.add(make_request(2, [5, 6, 7], max_tokens=5))
    driver.run()
    assert driver.tokens[2] == model.greedy([5, 6, 7], 5)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("way", "attends", "chunk", "num_bytes"),
    [
        ("padded", False, 7, 1 << 16),
        ("padded", True, 24, 1 << 16),
        ("padded", True, 24, 21_000),
        ("cpu graphs", False, 24, 1 << 16),
    ],
)
def test_drafts_that_do_not_stand_leave_no_state(
    way: str, attends: bool, chunk: int, num_bytes: int
) -> None:
    """SPC-06: the state goes back to the last draft that stands; in chunks, behind snapshots and after preemption."""
    model = RecurrentModel(attends=attends)
    spec = msgspec.structs.replace(
        spec_of(num_bytes=num_bytes),
        speculation=SpeculationSpec(
            method="ngram", num_tokens=3, max_rows=4, min_match=1, max_match=2, adaptive=False
        ),
    )
    runner = start_runner(spec, model, device=CPU, steps=WAYS[way]).runner
    driver = RunnerDriver(runner, spec, max_step_tokens=chunk, max_running=4)
    requests = [
        make_request(id, (prompt_of(request) * 2)[: 48 + id % 5], max_tokens=24)
        for id, request in enumerate(requests_of(chunk), start=1)
    ]
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        assert driver.tokens[request.id] == model.greedy(prompt_of(request), 24), request.id
    driver.assert_at_rest()
    stats = driver.core.scheduler.speculation.stats
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert driver.core.kv.num_hits > 0
    assert (driver.core.scheduler.num_preemptions > 0) == (num_bytes < 1 << 16)


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
def test_recurrent_state_in_cpu_graphs() -> None:
    """Resets, snapshots and the recurrence are replayed with the step."""
    model, spec = KernelsAlone(), spec_of()
    runner = start_runner(spec, model, device=CPU).runner
    driver = RunnerDriver(runner, spec, max_step_tokens=24)
    requests = requests_of(1)
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        expected = model.greedy(prompt_of(request), request.stop.max_tokens)
        assert driver.tokens[request.id] == expected, request.id
    driver.assert_at_rest()
    assert isinstance(runner._steps, BucketSteps)
    replay = runner._steps._replay
    assert isinstance(replay, CpuGraphs)
    assert replay.num_graphs > 0 and replay.foreign == ()
    assert driver.core.kv.num_hits > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("drafts", [0, 3])
def test_recurrent_state_in_cuda_graphs(drafts: int) -> None:
    device = torch.device("cuda")
    model, spec = RecurrentModel(attends=False, device=device), spec_of()
    if drafts:
        ngram = {"method": "ngram", "min_match": 1, "max_match": 2, "adaptive": False}
        speculation = SpeculationSpec(**ngram, num_tokens=drafts, max_rows=8)
        spec = msgspec.structs.replace(spec, speculation=speculation)
    runner = start_runner(spec, model, device=device).runner
    driver = RunnerDriver(runner, spec, max_step_tokens=24)
    requests = requests_of(1)
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        expected = model.greedy(prompt_of(request), request.stop.max_tokens)
        assert driver.tokens[request.id] == expected, request.id
    driver.assert_at_rest()
    assert driver.core.kv.num_hits > 0
