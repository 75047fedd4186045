"""The worker inside the core process: one dedicated thread that launches the steps in order.

`submit` only queues, so the core plans the next step while this one runs (torch gives the GIL back
inside its kernels). On a CPU the thread computes; on other devices it launches the next step while
this one runs there, and `Pending.result` waits for the device. A step that fails leaves the rows in
an unknown state: everything after it fails with the same reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from headrace.back.executor.profiler import Profiler
from headrace.back.executor.resident import (
    DEFAULT_LOADER,
    Resident,
    build_resident,
    set_threads,
)
from headrace.back.runner.results import LaunchedStep
from headrace.back.runner.runner import AwaitDeferred
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import EngineDead
from headrace.base.wire.slots import KVOrder, KVReply
from headrace.base.wire.step import (
    AdapterOrder,
    AdapterReply,
    DeferredInputs,
    RecordedGraphs,
    StepPlan,
    StepResult,
    WorkerFacts,
)
from headrace.base.wire.weights import BESIDE_STEPS, WeightOrder, WeightReply

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class InlinePending:
    """A step on its way through the thread and the device. `failed` makes the executor's one
    EngineDead of an error."""

    _future: Future[LaunchedStep]
    _failed: Callable[[int, Exception], EngineDead]
    _step: int

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        if not self._future.done():
            return False
        if self._future.cancelled() or self._future.exception() is not None:
            return True
        return self._future.result().done()

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Waits for the step; TimeoutError if it is not launched within `timeout_s`, EngineDead if
        this step or an earlier one failed. A device that hangs is noticed by the process's
        watchdog."""
        try:
            launched_step = self._future.result(timeout_s)
        except CancelledError:
            raise EngineDead("the executor is closed") from None
        try:
            return launched_step.result()
        except Exception as error:
            raise self._failed(self._step, error) from error


class StepThreads:
    """How many threads torch's own ops get in a step.

    Where the matrix products are native, what is left to torch is small, and OpenMP's barrier waits
    for every thread: with one core taken by another process a copy of 37k logits took 12 ms on two
    threads and 0.02 ms on one. Torch gets its threads back for steps whose logits are so many that
    they pay (penalties, sorts and the like).
    """

    LARGE = 1 << 22

    def __init__(self, threads: int, facts: WorkerFacts) -> None:
        chosen_kernels = [
            chosen for field, _, chosen, _ in facts.decisions if "kernel.linear" in field
        ]
        self._native = bool(chosen_kernels) and set(chosen_kernels) == {"native"}
        self._width = facts.logits_width
        self._threads = threads
        self._now: int | None = None

    def fit(self, plan: StepPlan) -> None:
        """Before each step, on the thread that runs it."""
        large = np.count_nonzero(plan.sample) * self._width >= self.LARGE
        wanted = self._threads if large or not self._native else 1
        if wanted != self._now:
            self._now = wanted
            torch.set_num_threads(wanted)


Launch = Callable[[StepPlan, AwaitDeferred], LaunchedStep]


def _no_launch(plan: StepPlan, await_deferred: AwaitDeferred) -> LaunchedStep:
    """Where there is no runner: it would be kept by whoever knows how it launches."""
    raise EngineDead("the executor is parked or closed")


class InlineExecutor:
    """Loads the model and runs steps on one thread of this process.

    `loader`: see resident.build_resident.
    """

    def __init__(self, spec: EngineSpec, *, loader: str = DEFAULT_LOADER) -> None:
        self._failure: EngineDead | None = None
        self._closed = threading.Event()
        self._profiler = Profiler()
        self._deferred_inputs: SimpleQueue[DeferredInputs | None] = SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-worker")
        try:
            # No initializer: of what fails in one, a pool tells only that it is broken.
            self._thread.submit(set_threads, spec.device).result()
            self._resident: Resident = self._thread.submit(build_resident, spec, loader).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._adapting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-adapters")
        self._moving = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-kv")
        self._launch: Launch = self._resident.runner.launch
        self._facts = self._resident.facts
        self._threads = StepThreads(spec.device.threads, self._facts)

    @property
    def facts(self) -> WorkerFacts:
        """What the loaded worker states."""
        return self._facts

    def submit(self, plan: StepPlan) -> InlinePending:
        """Queues a step; raises at once if an earlier one is known to have failed."""
        self.check()
        return InlinePending(self._thread.submit(self._run, plan), self._fail, plan.step)

    def send_deferred(self, step: int, payloads: dict[str, memoryview]) -> None:
        """See Executor."""
        self._deferred_inputs.put(DeferredInputs(step, payloads))

    def profile(self, folder: str | None) -> list[str]:
        """See Executor."""
        self.check()
        return [self._thread.submit(self._profiler.turn, folder).result()]

    def record_graph(self) -> RecordedGraphs:
        """See Executor."""
        self.check()
        return self._thread.submit(self._resident.runner.record_next).result()

    def park(self) -> None:
        """See Executor."""
        self.check()
        self._launch = _no_launch
        self._thread.submit(self._resident.park).result()

    def unpark(self) -> None:
        """See Executor."""
        self.check()
        self._thread.submit(self._resident.unpark).result()
        self._launch, self._facts = self._resident.runner.launch, self._resident.facts

    def adapt(self, order: AdapterOrder) -> Future[AdapterReply]:
        """See AdapterWorkers."""
        self.check()
        return self._adapting.submit(self._resident.adapt, order)

    def weigh(self, order: WeightOrder) -> Future[WeightReply]:
        """See WeightWorkers."""
        self.check()
        if order.action not in BESIDE_STEPS:
            return self._thread.submit(self._resident.weigh, order)
        reply: Future[WeightReply] = Future()

        def meet() -> None:
            reply.set_result(self._resident.weigh(order))

        threading.Thread(target=meet, name="headrace-weights", daemon=True).start()
        return reply

    def move(self, order: KVOrder) -> Future[KVReply]:
        """See KVWorkers."""
        self.check()
        behind = self._thread.submit(self._resident.behind_steps)
        return self._moving.submit(lambda: self._resident.move(order, behind.result()))

    def log_level(self, level: str) -> None:
        """See Executor: this process's level is the worker's."""

    def check(self) -> None:
        """Raises EngineDead if a step has failed, or after `close`."""
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise EngineDead("the executor is closed")

    def close(self) -> None:
        """Lets the running step end, drops the queued ones and frees the model; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._deferred_inputs.put(None)  # a step that still waits for its deferred inputs ends
        self._adapting.shutdown(wait=True, cancel_futures=True)
        self._moving.shutdown(wait=True, cancel_futures=True)
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._launch = _no_launch
        self._resident.close()

    def _run(self, plan: StepPlan) -> LaunchedStep:
        if self._failure is not None:
            raise self._failure
        try:
            self._threads.fit(plan)
            return self._launch(plan, self._await_deferred)
        except Exception as error:
            raise self._fail(plan.step, error) from error

    def _await_deferred(self, step: int) -> dict[str, memoryview]:
        deferred = self._deferred_inputs.get()
        if deferred is None:
            raise EngineDead("the executor is closed")
        assert deferred.step == step, (deferred.step, step)
        return deferred.payloads

    def _fail(self, step: int, error: Exception) -> EngineDead:
        """The first failure is the one that is told."""
        log.error("step %d failed", step, exc_info=error)
        if self._failure is None:
            self._failure = EngineDead(f"step {step} failed: {type(error).__name__}")
        return self._failure
