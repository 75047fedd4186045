"""Workers in processes of their own, one per rank; the core speaks to each over a socket pair.
Imports no torch.

The first rank of the last stage answers with results; the others are silent unless they fail.
Whatever ends one worker (an exception, a kill, an exit, a stop by a signal) ends all of them, and
every pending step fails with EngineDead: a rank that is left alone would wait in its next
collective for ever. Death shows as the end of the worker's stream, within milliseconds; a stop to
looks at the process, within a second.
"""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from headrace.back.executor.channel import (
    TO_CORE,
    TO_WORKER,
    Channel,
    GraphReply,
    ParkReply,
    ParkWeights,
    ProfileReply,
    ProfileSteps,
    RecordGraph,
    SetLogLevel,
    SharedReply,
    ShareExperts,
    StartWorker,
    WorkerFailed,
    WorkerReady,
)
from headrace.back.executor.facts import check_groups, facts_of_all, graphs_of_all
from headrace.base import env
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import EngineDead, EngineError, HeadraceError, from_wire
from headrace.base.process_stop import CHECK_S, StopDetector
from headrace.base.telemetry import log as logs
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
from headrace.base.wire.weights import WeightOrder, WeightReply

log = logging.getLogger(__name__)

WORKER = "headrace.back.executor.worker_entry"
LOADER = "headrace.back.models.load:load_model"
SEND_TIMEOUT_S = 10.0
"""A worker reads all the time; one that lets a plan wait so long is stopped or stuck."""
PROFILE_TIMEOUT_S = 120.0
PARK_TIMEOUT_S = 600.0
RECORD_TIMEOUT_S = 60.0
SHARE_TIMEOUT_S = 600.0
REPLY_POLL_S = 0.2
R = TypeVar("R", ProfileReply, ParkReply, GraphReply, SharedReply)
A = TypeVar("A", AdapterReply, WeightReply, KVReply)


class ProcessPending:
    """A step that the workers have been sent."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: HeadraceError | None = None

    def finish(self, result: StepResult | None, error: HeadraceError | None = None) -> None:
        """The step's end; exactly one of both."""
        self._result, self._error = result, error
        self._done.set()

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Waits for the step; TimeoutError after `timeout_s`, EngineDead if a worker has ended."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the step has not finished within {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class PendingOrder(Generic[A]):
    """An order that all workers have been sent; each answers it. `failure`: why none will any
    more."""

    def __init__(self, count: int, failure: Callable[[], HeadraceError | None]) -> None:
        self._left, self._failure = count, failure
        self._replies: list[A] = []

    def add(self, reply: A) -> None:
        """A worker's answer."""
        self._replies.append(reply)

    def done(self) -> bool:
        """See PendingAdapter."""
        return len(self._replies) == self._left or self._failure() is not None

    def result(self) -> A:
        """The first that failed, else the first."""
        failure = self._failure()
        if failure is not None:
            raise failure
        failed = (reply for reply in self._replies if reply.error is not None)
        return next(failed, self._replies[0])


class WorkerProcess:
    """One worker process and the core's end of its channel."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *env.python_command(),
                    "-m",
                    WORKER,
                    str(theirs.fileno()),
                    str(rank),
                    logs.level(),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.channel = Channel(mine, send_timeout_s=SEND_TIMEOUT_S)

    def ready(self) -> WorkerFacts:
        """Waits until the worker is loaded; raises its StartError, or EngineDead if it ended
        without one."""
        body = self.channel.receive()
        message = TO_CORE.decode(body) if body is not None else None
        if isinstance(message, WorkerFailed):
            raise from_wire(message.error)
        if not isinstance(message, WorkerReady):
            raise EngineDead(f"worker {self.rank} {self.ending()} while it started")
        return message.facts

    def ending(self) -> str:
        """How the process ended, in words; it is known to have closed its stream."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its stream"
        return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


class ProcessExecutor:
    """Runs steps on worker processes. `loader`: see resident.build_resident."""

    def __init__(self, spec: EngineSpec, *, loader: str = LOADER) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, ProcessPending]] = deque()
        self._failure: EngineDead | None = None
        self._profiled: SimpleQueue[ProfileReply] = SimpleQueue()
        self._parked: SimpleQueue[ParkReply] = SimpleQueue()
        self._recorded: SimpleQueue[GraphReply] = SimpleQueue()
        self._shared: SimpleQueue[SharedReply] = SimpleQueue()
        ranks = range(spec.device.world_size)
        self._first_sampling = spec.device.world_size - spec.device.tensor_parallel
        self._orders: list[deque[PendingOrder[AdapterReply]]] = [deque() for _ in ranks]
        self._weight_orders: list[deque[PendingOrder[WeightReply]]] = [deque() for _ in ranks]
        self._kv_orders: list[deque[PendingOrder[KVReply]]] = [deque() for _ in ranks]
        self._takers: dict[type, Callable[[int, Any], None]] = {
            StepResult: lambda rank, result: self._finish(result),
            ProfileReply: lambda rank, reply: self._profiled.put(reply),
            ParkReply: lambda rank, reply: self._parked.put(reply),
            SharedReply: lambda rank, reply: self._shared.put(reply),
            GraphReply: lambda rank, reply: self._recorded.put(reply),
            AdapterReply: lambda rank, reply: self._add_reply(self._orders[rank], reply),
            WeightReply: lambda rank, reply: self._add_reply(self._weight_orders[rank], reply),
            KVReply: lambda rank, reply: self._add_reply(self._kv_orders[rank], reply),
        }
        self._ended = threading.Event()
        self._folder = Path(
            tempfile.mkdtemp(prefix="headrace-", dir=env.get("HEADRACE_RUNTIME_DIR"))
        )
        if spec.device.world_size > 1 or spec.device.expert_group is not None:
            env.set_default("GLOO_SOCKET_IFNAME", "lo")
            env.set_default(
                "NCCL_NVLS_ENABLE", "0"
            )  # multicast may put a shared host's GPUs out of service
        self._workers = [WorkerProcess(rank) for rank in range(spec.device.world_size)]
        try:
            self._facts = self._start(spec, loader)
        except BaseException:
            self._fail("the executor could not start")
            raise
        for worker in self._workers:
            name = f"headrace-worker-{worker.rank}"
            threading.Thread(target=self._listen, args=(worker,), name=name, daemon=True).start()
        threading.Thread(target=self._watch, name="headrace-worker-stops", daemon=True).start()

    @property
    def facts(self) -> WorkerFacts:
        """What the loaded workers state; the smallest KV pool counts."""
        return self._facts

    def submit(self, plan: StepPlan) -> ProcessPending:
        """Sends a step to all workers; raises at once if one is known to have ended."""
        pending, frame = ProcessPending(), TO_WORKER.frame(plan)
        with self._lock:
            self.check()
            self._pending.append((plan.step, pending))
        self._send(frame)
        return pending

    def send_deferred(self, step: int, payloads: dict[str, memoryview]) -> None:
        """See Executor. The last stage samples."""
        self._send(TO_WORKER.frame(DeferredInputs(step, payloads)), first=self._first_sampling)

    def _send(self, frame: bytes, *, first: int = 0) -> None:
        for worker in self._workers[first:]:
            try:
                worker.channel.send(frame)
            except OSError as error:
                self._fail(f"worker {worker.rank} takes no more steps ({type(error).__name__})")

    def profile(self, folder: str | None) -> list[str]:
        """See Executor."""
        self.check()
        self._send(TO_WORKER.frame(ProfileSteps(folder)))
        return sorted(one.place for one in self._all(self._profiled, PROFILE_TIMEOUT_S))

    def record_graph(self) -> RecordedGraphs:
        """See Executor. Ranks have run the same steps and record the same one."""
        self.check()
        self._send(TO_WORKER.frame(RecordGraph()))
        return graphs_of_all([one.graphs for one in self._all(self._recorded, RECORD_TIMEOUT_S)])

    def share_experts(self, cores: int, folder: str) -> None:
        """See Executor."""
        self.check()
        self._send(TO_WORKER.frame(ShareExperts(cores, folder)))
        self._all(self._shared, SHARE_TIMEOUT_S)

    def park(self) -> None:
        """See Executor."""
        self.check()
        self._send(TO_WORKER.frame(ParkWeights(back=False)))
        self._all(self._parked, PARK_TIMEOUT_S)

    def unpark(self) -> None:
        """See Executor."""
        self.check()
        self._send(TO_WORKER.frame(ParkWeights(back=True)))
        answers = self._all(self._parked, PARK_TIMEOUT_S)
        self._facts = self._facts_of([one.facts for one in answers if one.facts is not None])

    def adapt(self, order: AdapterOrder) -> PendingOrder[AdapterReply]:
        """See AdapterWorkers."""
        return self._ordered(order, self._orders)

    def weigh(self, order: WeightOrder) -> PendingOrder[WeightReply]:
        """See WeightWorkers."""
        return self._ordered(order, self._weight_orders)

    def move(self, order: KVOrder) -> PendingOrder[KVReply]:
        """See KVWorkers."""
        return self._ordered(order, self._kv_orders)

    def _ordered(
        self, order: AdapterOrder | WeightOrder | KVOrder, queues: list[deque[PendingOrder[A]]]
    ) -> PendingOrder[A]:
        self.check()
        pending: PendingOrder[A] = PendingOrder(len(self._workers), lambda: self._failure)
        with self._lock:
            for orders in queues:
                orders.append(pending)
            frame = TO_WORKER.frame(order)
        self._send(frame)
        return pending

    def _all(self, replies: SimpleQueue[R], timeout_s: float) -> list[R]:
        """Every worker's reply; EngineDead if one ends meanwhile, the first error if one could not
        do it."""
        answers: list[R] = []
        due = time.monotonic() + timeout_s
        while len(answers) < len(self._workers):
            try:
                answers.append(replies.get(timeout=REPLY_POLL_S))
            except Empty:
                self.check()
                if time.monotonic() > due:
                    raise EngineError("the workers have not answered in time") from None
        for one in answers:
            if one.error is not None:
                raise from_wire(one.error)
        return answers

    def log_level(self, level: str) -> None:
        """See Executor."""
        self.check()
        self._send(TO_WORKER.frame(SetLogLevel(level)))

    def check(self) -> None:
        """Raises EngineDead if a worker has ended, or after `close`."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the workers and returns when they are gone; idempotent."""
        self._fail("the executor is closed", is_expected=True)
        self._ended.wait()

    def _start(self, spec: EngineSpec, loader: str) -> WorkerFacts:
        """Sends every worker its orders and waits for all; the first that fails is the reason."""
        for worker in self._workers:
            begin = StartWorker(
                rank=worker.rank,
                world_size=len(self._workers),
                spec=spec,
                rendezvous=str(self._folder / "rendezvous"),
                loader=loader,
            )
            worker.channel.send(TO_WORKER.frame(begin))
        return self._facts_of([worker.ready() for worker in self._workers])

    def _facts_of(self, facts: list[WorkerFacts]) -> WorkerFacts:
        """What all workers state; the first that samples says what one alone knows."""
        check_groups(facts)
        at = self._first_sampling
        return facts_of_all([facts[at], *facts[:at], *facts[at + 1 :]])

    def _listen(self, worker: WorkerProcess) -> None:
        """Takes what a worker sends until its stream ends."""
        while (body := worker.channel.receive()) is not None:
            message = TO_CORE.decode(body)
            if isinstance(message, WorkerFailed):
                where = "between steps" if message.step is None else f"in step {message.step}"
                return self._fail(f"worker {worker.rank} failed {where}: {message.error.message}")
            self._takers[type(message)](worker.rank, message)
        self._fail(f"worker {worker.rank} {worker.ending()}")

    def _add_reply(self, orders: deque[PendingOrder[A]], reply: A) -> None:
        """Of a worker to the oldest order that it has not answered."""
        with self._lock:
            orders.popleft().add(reply)

    def _watch(self) -> None:
        """Looks for workers that a signal has stopped, until all are ended."""
        detectors = [StopDetector(worker.process.pid) for worker in self._workers]
        while not self._ended.wait(CHECK_S):
            for worker, detector in zip(self._workers, detectors, strict=True):
                if detector.is_stopped(time.monotonic()):
                    self._fail(f"worker {worker.rank} was stopped by a signal")

    def _finish(self, result: StepResult) -> None:
        with self._lock:
            if not self._pending:
                return
            step, pending = self._pending.popleft()
        assert step == result.step, (step, result.step)
        pending.finish(result)

    def _fail(self, reason: str, *, is_expected: bool = False) -> None:
        """Ends everything, once: the first reason is the one that is told."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = EngineDead(reason)
            lost, self._pending = list(self._pending), deque()
        if not is_expected:
            log.error("%s; all workers are ended", reason)
        for _, pending in lost:
            pending.finish(None, self._failure)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ended.set()
