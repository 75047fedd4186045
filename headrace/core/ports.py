"""What the core asks of others. The core declares these protocols and imports none of their
implementations.

Executor        runs plans on the workers, in order, without blocking the loop
AdmissionHook            a condition outside budget, KV and queues under which a request may not run
                         now, or never
GrammarBackend  compiles grammars and follows them token by token
StatsSink       receives one record per step and per finished request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError
from headrace.base.wire.grammar import Node
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.slots import KVOrder, KVReply
from headrace.base.wire.step import (
    AdapterOrder,
    AdapterReply,
    RecordedGraphs,
    StepPlan,
    StepResult,
    WorkerFacts,
)
from headrace.base.wire.weights import WeightOrder, WeightReply


class Pending(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once."""
        ...

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Waits for the step; raises EngineError if the step failed as a whole, TimeoutError after
        `timeout_s`."""
        ...


class Executor(Protocol):
    """Runs steps. Steps run strictly in the order of submission; `submit` returns without waiting
    for the device."""

    @property
    def facts(self) -> WorkerFacts:
        """What the loaded workers state."""
        ...

    def submit(self, plan: StepPlan) -> Pending:
        """Queues a step. A failure of an earlier step that is already known raises at once."""
        ...

    def send_deferred(self, step: int, payloads: dict[str, memoryview]) -> None:
        """The payloads of the hooks in `plan.deferred` for step `step`, once the results of every
        earlier step are in.

        The workers wait for them before they sample, not before they compute; so the result of a
        step must never wait for the deferred inputs of a later one. Called exactly once for each
        plan with `deferred`. The payloads may be overwritten once the step's result is in.
        """
        ...

    def profile(self, folder: str | None) -> list[str]:
        """Starts tracing the workers' steps (a folder), or stops and writes the traces (None); the
        folder, or the files. Conflict if it runs already, or does not."""
        ...

    def record_graph(self) -> RecordedGraphs:
        """Nothing is in flight: the workers record at most one graph of a step that traffic takes;
        what is recorded then."""
        ...

    def log_level(self, level: str) -> None:
        """What workers in processes of their own log from now on: debug, info, warning or error."""
        ...

    def park(self) -> None:
        """Nothing runs, and no row is held from now on: gives back the KV cache and what else is on
        the device; the weights wait in host memory. Until `unpark` nothing may be submitted."""
        ...

    def unpark(self) -> None:
        """Ready with the same weights, which were not loaded again; `facts` may tell of other
        sizes."""
        ...

    def check(self) -> None:
        """Raises EngineDead if a worker has died."""
        ...

    def close(self) -> None:
        """Ends the workers and frees what they hold; idempotent."""
        ...


class PendingAdapter(Protocol):
    """An order on its way."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> AdapterReply:
        """What became of the order; EngineDead if the workers are gone."""
        ...


class AdapterWorkers(Protocol):
    """An executor whose model takes low-rank adapters."""

    def adapt(self, order: AdapterOrder) -> PendingAdapter:
        """Carries out an order beside the steps; returns at once. A step that is submitted once
        `done` says so sees what it has done."""
        ...


class PendingWeights(Protocol):
    """An order about weights on its way."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> WeightReply:
        """What became of the order; EngineDead if the workers are gone."""
        ...


class WeightWorkers(Protocol):
    """An executor whose weights can be replaced while it is loaded."""

    def weigh(self, order: WeightOrder) -> PendingWeights:
        """Carries out an order behind the steps submitted before, or, if it is one of
        BESIDE_STEPS, beside them; returns at once."""
        ...


@runtime_checkable
class ExpertWorkers(Protocol):
    """An executor whose experts engine cores share out."""

    def share_experts(self, cores: int, folder: str) -> None:
        """The first so many cores share them out from now on; they meet in a folder that is new.
        Returns once they have; nothing may be under way on any of them."""
        ...


class PendingKV(Protocol):
    """An order about blocks of the KV cache on its way."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> KVReply:
        """What became of the order; EngineDead if the workers are gone."""
        ...


class KVWorkers(Protocol):
    """An executor whose blocks can be copied to files and from them."""

    def move(self, order: KVOrder) -> PendingKV:
        """Carries out an order beside the steps, behind those submitted before; returns at once.
        Nobody may write to the order's blocks until it is done."""
        ...


class ExecutorSource(Protocol):
    """Makes executors for other weights of the same model."""

    def check(self, model: str) -> None:
        """Refuses weights that do not fit this engine, by what their headers say; nothing is
        loaded."""
        ...

    def make(self, model: str) -> Executor:
        """An executor over the weights at `model`; "": those that were made last, or at start. Once
        it is made, a restarted core begins with them too."""
        ...

    def turn_to(self, model: str) -> None:
        """Nothing is loaded: the next executor of "" is one of the weights at `model`, which
        `check` has let pass; should that fail, the one behind it is as the last."""
        ...

    def rests(self, facts: WorkerFacts) -> None:
        """The executor of these facts is asleep: a core that is started in this one's place begins
        without one, and knows them."""
        ...


class AdmissionVerdict(msgspec.Struct, frozen=True):
    """A hook's answer: "yes", "not_now" or "never", with the reason people are shown."""

    answer: str
    reason: str = ""


Encode: TypeAlias = Callable[[str], list[int]]
Ends: TypeAlias = dict[int, HeadraceError | str]


def none_computed() -> int:
    """No token of a request is in the cache."""
    return 0


class AdmissionHook(Protocol):
    """An optional condition on running a request (LoRA slots, encoder budget, grammar, KV
    transfer)."""

    name: str

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """Called once when the request arrives: "never" refuses it with the reason."""
        ...

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """Called when the request could be scheduled: "not_now" leaves it in its place in the
        queue. `computed`: finds out how many of its tokens a prefix hit covers."""
        ...

    def payload(self, request_ids: list[int]) -> bytes | None:
        """What the workers need for this step, None for nothing."""
        ...

    def finish(self, request_id: int) -> None:
        """The request ended, on whatever path; called exactly once per admitted request."""
        ...

    def renew(self) -> None:
        """Other workers have taken over, which know nothing of earlier payloads; nothing runs."""

    def renew_content(self) -> None:
        """The workers' weights are others: what they made of a request's content before is void."""
        return

    @property
    def num_held(self) -> int:
        """Requests for which the hook keeps something."""
        return 0

    def figures(self) -> Mapping[str, int]:
        """What it has counted since the start, by the names that reports tell."""
        return {}

    def defers(self, request_ids: list[int]) -> bool:
        """Whether the workers must wait for this hook's deferred payload before they sample these
        requests."""
        return False

    @property
    def follows_drafts(self) -> bool:
        """Whether `deferred_payload` says what is needed behind drafts too."""
        return False

    def deferred_payload(
        self,
        rows: npt.NDArray[np.int32],
        request_ids: list[int],
        drafts: Sequence[npt.NDArray[np.int32]],
    ) -> memoryview:
        """What the workers need before they sample these requests; every token before that is known
        by now. `drafts`: of each row, those that the step may verify."""
        return memoryview(b"")

    def forced(self) -> dict[int, list[int]]:
        """By request, the tokens that must follow where `deferred_payload` has just said what may;
        returned once. The core may take a part of them, which `accept_tokens` then brings, or none.
        """
        return {}

    def accept_tokens(self, request_ids: list[int], tokens: list[int]) -> Ends:
        """New tokens that count. Returns the requests among these that end with their token: the
        reason ("stop" where it is complete), or why they cannot go on."""
        return {}


MAX_FORCED = 1024
"""Forced tokens that are looked for at a time; what follows them is looked for behind them."""


class Matcher(Protocol):
    """One answer's place in a compiled grammar."""

    def accept(self, token: int) -> bool:
        """Goes on by a token; false if the grammar does not allow it (nothing may be asked of it
        afterwards)."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must follow, at most MAX_FORCED, cut as the tokenizer would cut their text
        whatever comes behind them. Its time is bounded, whatever the grammar; [] where none are
        known."""
        ...

    def copy(self) -> Matcher:
        """Another one at the same place."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. `compile` is called off the loop, everything else in
    it."""

    name: str

    def compile(self, node: Node) -> Matcher:
        """A matcher at the beginning; InvalidRequest with the reason if the grammar is none or not
        supported."""
        ...

    def fill(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        """Writes what may follow into masks [K, words], bit i of word j for id 32 j + i; per
        matcher what failed."""
        ...


class StatsSink(Protocol):
    """Receives counters; must not block."""

    def step(
        self,
        *,
        running: int,
        waiting: int,
        tokens: int,
        free_blocks: int,
        host_s: float,
        plan: StepPlan,
    ) -> None:
        """One scheduled step. Sinks of packages are told all but the plan."""
        ...

    def finished(self, *, reason: str, num_prompt: int, num_output: int, num_cached: int) -> None:
        """One finished request."""
        ...
