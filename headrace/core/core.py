"""The engine core: plan -> submit -> update, with one step in flight while the next is planned.

A step's sampled tokens are fed to the next one on the device, so that the plan may let a row decode whose input token
the core does not know yet. A stop that is found late costs that row one wasted token, which is void here because the
row's epoch has changed; without overlap the same code runs with nothing in flight, and the tokens are the same.

Called from one thread; owns no thread and no socket (launch/core_process.py does).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import (
    Conflict,
    DeadlineExceeded,
    EngineDead,
    HeadraceError,
    Unavailable,
    WireError,
    to_wire,
)
from headrace.base.wire.request import Call, EngineRequest, Finished, Hello, Reply
from headrace.core.admission import Load, check_queue, check_request
from headrace.core.control import Control
from headrace.core.counters import Counters
from headrace.core.jump import Jumps
from headrace.core.kv.manager import KVManager
from headrace.core.landing import Landing
from headrace.core.outbox import Outbox, StepOutput
from headrace.core.ports import Executor, ExecutorSource, Gate, Pending, StatsSink
from headrace.core.request import TOKEN_BYTES, Request, State
from headrace.core.rows import RowTable
from headrace.core.scheduler.draft import Flight
from headrace.core.scheduler.gates import Gates
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.swap import Swap

GATE_POLL_S = 0.002


class EngineCore:
    """Requests in, tokens out.

    Invariants:
    - every request added is answered by exactly one `Finished`, on every path;
    - a request in `requests` is in the queue or owns a row; one that is not holds nothing.
    """

    def __init__(
        self,
        spec: EngineSpec,
        executor: Executor,
        *,
        gates: Sequence[Gate] = (),
        stats: StatsSink | None = None,
        source: ExecutorSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec.scheduler
        self.clock = clock
        self.gates = Gates(gates)
        self.requests: dict[int, Request] = {}
        self.counters = Counters(clock())
        self.outbox = Outbox()
        self.swap = Swap(self, source)
        self._kv_spec = spec.kv
        self._build(executor)
        self.control = Control(self)
        self._stats = stats
        self._flights: deque[tuple[Flight, Pending]] = deque()
        self._depth = 1 if self.spec.overlap else 0
        self._deadlines: list[tuple[float, int]] = []
        self._arrivals = 0
        self._stalled_at: float | None = None

    def _build(self, executor: Executor) -> None:
        """Everything whose size follows from what the executor states."""
        self.executor = executor
        self.facts = executor.facts
        self.kv = KVManager(
            self.facts,
            prefix_caching=self._kv_spec.prefix_caching,
            chunk_tokens=self.spec.max_step_tokens,
        )
        num_rows = min(self.spec.max_running, self.facts.max_rows)
        self.rows = RowTable(num_rows, self.facts.block_tokens)
        self.scheduler = Scheduler(self.spec, self.kv, self.rows, self.gates, self.clock)
        self._landing = Landing(self.rows, self.kv, self.gates, self.outbox, self.end)
        self._jumps = Jumps(self.rows, self.scheduler, self.outbox, end=self.end, now=self.clock)

    def install(self, executor: Executor) -> None:
        """Goes on with another executor while nothing runs. Requests that wait keep their order; one that the new
        executor could never run ends with the reason."""
        waiting = list(self.scheduler.queue)
        admit_new = self.scheduler.admit_new
        self._build(executor)
        self.scheduler.admit_new = admit_new
        for request in waiting:
            request.chain.clear()
            request.chain_start = b""
            self.scheduler.enqueue(request)
            try:
                request.length_limit = check_request(request.wire, self.facts, self.kv)
            except HeadraceError as error:
                self.end(request, "error", error=to_wire(error))

    def hello(self) -> Hello:
        """What fronts must know to check requests."""
        return Hello(
            logits_width=self.facts.logits_width,
            max_model_len=self.facts.max_model_len,
            capacity_tokens=self.kv.capacity_tokens,
            max_running=self.rows.num_rows,
            max_in_flight=None
            if self.spec.policy == "priority"
            else self.rows.num_rows + self.spec.max_queued_requests,
            num_blocks=self.facts.num_blocks,
            block_tokens=self.facts.block_tokens,
            trouble=self.swap.lost,
            log_level=self.control.log_level,
            start_s=self.facts.start_s,
            decisions=self.facts.decisions,
        )

    # what fronts ask

    def add(self, request: EngineRequest) -> None:
        """Takes a request. One that cannot be taken is answered by an error in the next output."""
        self._stalled_at = None
        try:
            self._admit(request)
        except Exception as error:
            self.counters.refused += 1
            self.outbox.add_finished(Finished(id=request.id, reason="error", error=to_wire(error)))

    def _admit(self, wire: EngineRequest) -> None:
        if wire.id in self.requests:
            raise Conflict(f"request {wire.id} is in flight already", field="id")
        self.control.check_open()
        length_limit = check_request(wire, self.facts, self.kv)
        self._check_queue(wire)
        self.gates.admit(wire)
        now = self.clock()
        request = Request(
            wire,
            arrival=self._arrivals,
            now=now,
            groups=len(self.facts.groups),
            length_limit=length_limit,
        )
        self._arrivals += 1
        self.requests[wire.id] = request
        self.scheduler.enqueue(request)
        if wire.deadline_s is not None:
            self._remember_deadline(now + wire.deadline_s, wire.id)

    def _check_queue(self, wire: EngineRequest) -> None:
        queue = self.scheduler.queue
        try:
            load = Load(len(queue), queue.num_tokens, self.rows.num_free, self.counters.rate)
            check_queue(self.spec, load, len(wire.prompt) // TOKEN_BYTES)
        except Unavailable as full:
            worst = self._worse_waiting(wire)
            if worst is None:
                raise
            self.end(worst, "error", error=to_wire(full))

    def _worse_waiting(self, wire: EngineRequest) -> Request | None:
        """Under the priority policy: the queued request that must make room for a more urgent one."""
        if self.spec.policy != "priority":
            return None
        fresh = (request for request in self.scheduler.queue if request.scheduled_at is None)
        worst = max(fresh, key=lambda request: request.key, default=None)
        return worst if worst is not None and worst.wire.priority > wire.priority else None

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests; ids that are not in flight are ignored."""
        self._stalled_at = None
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.end(request, "abort")

    def call(self, call: Call) -> Reply | None:
        """A control call. None: the reply comes out of `step` once the operation is complete."""
        self._stalled_at = None
        return self.control.call(call)

    # the loop

    @property
    def has_work(self) -> bool:
        """Whether `step` may do something now; if not, wait for a message, at most `idle_s`."""
        if self.outbox or self._flights or self.idle_s == 0.0:
            return True
        if self.control.frozen or self._stalled_at is not None:
            return False
        return self.scheduler.num_running > 0 or len(self.scheduler.queue) > 0

    @property
    def idle_s(self) -> float | None:
        """How long nothing happens by itself while `has_work` is false; None: for ever."""
        timers = [self._deadlines[0][0]] if self._deadlines else []
        if self.control.drain_due is not None:
            timers.append(self.control.drain_due)
        if self._stalled_at is not None and self.gates and self.scheduler.queue:
            timers.append(self._stalled_at + GATE_POLL_S)  # a gate may have opened meanwhile
        return max(0.0, min(timers) - self.clock()) if timers else None

    def step(self, *, wait: bool) -> StepOutput:
        """Plans and submits a step if one may be in flight, and takes in the oldest one that is done.

        With `wait` it blocks until that is done. Raises EngineError if the workers failed: then call `fail_all`.
        """
        self._stalled_at = None
        self._expire()
        launched = len(self._flights) <= self._depth and not self.control.frozen and self._launch()
        if self._flights and (not launched or len(self._flights) > self._depth):
            flight, pending = self._flights[0]
            if wait or pending.done():
                self._land(flight, pending)
        self.control.advance()
        return self.outbox.take()

    def refuse_all(self, error: HeadraceError) -> None:
        """Ends everything with this error."""
        for request in list(self.requests.values()):
            self.end(request, "error", error=to_wire(error))

    def fail_all(self, error: HeadraceError) -> StepOutput:
        """Ends everything with this error: the workers are gone."""
        self._flights.clear()
        self.refuse_all(error)
        self.control.advance()
        return self.outbox.take()

    def close(self) -> None:
        """Ends the workers."""
        self.executor.close()

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet taken in."""
        return len(self._flights)

    def _launch(self) -> bool:
        begin = time.perf_counter()
        planned = self.scheduler.plan()
        self._end_hopeless()
        if planned is None:
            self._stalled_at = None if self._flights else self.clock()
            return False
        plan, flight = planned
        tokens = flight.num_decodes + flight.num_prefill_tokens
        self.counters.planned(self.clock(), rows=len(plan.rows), tokens=tokens)
        host_s = time.perf_counter() - begin
        flight.submitted_at = self.clock()
        self._flights.append((flight, self.executor.submit(plan)))
        self._supply()
        self.counters.plan_s += host_s
        if self._stats is not None:
            self._stats.step(
                running=self.scheduler.num_running,
                waiting=len(self.scheduler.queue),
                tokens=tokens,
                free_blocks=self.kv.pool.num_free,
                host_s=host_s,
            )
        return True

    def _end_hopeless(self) -> None:
        """Ends what the scheduler found to have no future."""
        for request, error in self.scheduler.hopeless:
            if error is None:
                self.end(request, "length")
            elif request.state is not State.FINISHED:
                self.end(request, "error", error=to_wire(error))
        self.scheduler.hopeless.clear()

    def _land(self, flight: Flight, pending: Pending) -> None:
        try:
            result = pending.result(self.spec.step_timeout_s)
        except TimeoutError:
            self.executor.check()
            raise EngineDead(f"a step took longer than {self.spec.step_timeout_s} s") from None
        begin, now = time.perf_counter(), self.clock()
        self._flights.popleft()
        self.scheduler.pace.landed(
            *(flight.submitted_at, now),
            decodes=flight.num_decodes,
            prefill_tokens=flight.num_prefill_tokens,
        )
        self.counters.output_tokens += self._landing.land(flight, result, now)
        self.counters.land_s += time.perf_counter() - begin
        self._supply()

    def _supply(self) -> None:
        """Sends what the gates have to say about the oldest step in flight: all tokens before it are known now, and the
        workers compute it already. Rows that have changed hands since are left out."""
        if not self._flights or not self._flights[0][0].late:
            return
        flight, _ = self._flights[0]
        live = (self.rows.epoch[flight.rows] == flight.epochs) & flight.sample
        rows = flight.rows[live]
        payloads = self.gates.late(flight.late, rows, self.rows.id[rows].tolist())
        flight.late = ()
        self.executor.supply(flight.step, payloads)
        jumped = self._jumps.take(self.gates, flight, self.requests.get)
        self.counters.output_tokens += jumped
        self.counters.jumped_tokens += jumped

    # ends

    def end(
        self,
        request: Request,
        reason: str,
        *,
        stop_id: int | None = None,
        error: WireError | None = None,
        forget: bool = False,
    ) -> None:
        """The one way out: frees everything a request holds and answers it."""
        now = self.clock()
        num_known = self.rows.num_known(request)
        del self.requests[request.id]
        self.scheduler.remove(request, forget=forget)
        request.move(State.FINISHED, now=now)
        if self.gates:
            self.gates.finish(request.id)
        self.counters.finished[reason] += 1
        self.outbox.add_finished(_finished(request, reason, stop_id=stop_id, error=error, now=now))
        if self._stats is not None:
            self._stats.finished(
                reason=reason,
                num_prompt=request.num_prompt,
                num_output=num_known - request.num_prompt,
                num_cached=request.num_cached,
            )

    # deadlines

    def _remember_deadline(self, due: float, request_id: int) -> None:
        if len(self._deadlines) > 2 * len(self.requests) + 1024:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (due, request_id))

    def _expire(self) -> None:
        """Ends requests whose deadline has passed; those still queued never reach the device."""
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None:
                limit = request.wire.deadline_s
                passed = DeadlineExceeded(
                    f"not finished within {limit} s ({request.state.value}: {request.reason})",
                    field="timeout_s",
                )
                self.end(request, "error", error=to_wire(passed))


def _finished(
    request: Request, reason: str, *, stop_id: int | None, error: WireError | None, now: float
) -> Finished:
    began = request.arrived_at
    return Finished(
        id=request.id,
        reason=reason,
        stop_id=stop_id,
        error=error,
        num_cached=request.num_cached,
        num_preemptions=request.num_preemptions,
        preempted_s=tuple(at - began for at in request.preempted_at),
        gated_s=request.gated_s,
        scheduled_s=None if request.scheduled_at is None else request.scheduled_at - began,
        first_token_s=None if request.first_token_at is None else request.first_token_at - began,
        total_s=now - began,
    )
