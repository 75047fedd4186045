"""The engine core: plan -> submit -> update, with one step in flight while the next is planned.

A step's sampled tokens are fed to the next one on the device, so that the plan may let a row decode
whose input token the core does not know yet. A stop that is seen late costs that row one wasted
token, which is void here because the row's epoch has changed; without overlap the same code runs
with nothing in flight, and the tokens are the same.

Called from one thread; owns no thread and no socket (launch/core_process.py does).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
from headrace.base.wire.control import Call, Hello, Reply
from headrace.base.wire.request import EngineRequest, Finished, Load
from headrace.core.adapter_choice import adapted
from headrace.core.adapters import BASE, Adapters
from headrace.core.admission import (
    check_deadline,
    check_open,
    check_policy,
    check_queue,
    check_request,
    check_share,
    latest_start_s,
    load_of,
    worse_waiting,
)
from headrace.core.control import Control, pause_is_complete
from headrace.core.jump_forward import JumpForward
from headrace.core.kv.build import kv_manager_of
from headrace.core.kv.manager import KVManager
from headrace.core.lifecycle import ExecutorLifecycle
from headrace.core.media_checks import uncut_spans
from headrace.core.output_processor import (
    CoreOutput,
    OutputBuffer,
    StepOutputProcessor,
    finished_of,
)
from headrace.core.ports import AdmissionHook, Executor, ExecutorSource, Pending, StatsSink
from headrace.core.reports import hello_of, reason_of
from headrace.core.request import Request, RequestState, RowTable
from headrace.core.scheduler.choice import scheduler_of
from headrace.core.scheduler.plan_builder import InFlightStep
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.speculation import speculation_of
from headrace.core.service_state import Counters, Deadlines, PauseMode, RequestIndex, ServiceState
from headrace.core.slots import rows_of
from headrace.core.stall import StallWatch
from headrace.core.weights import Weights, no_weights

LEAST_SLOW_STEP_S = 10.0
SLOW_FACTOR = 20.0  # a step this many times as long as expected is taken for hung by health
FAILING_STEPS = 3  # so many steps without one good row in a row, and the engine says that it fails


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """An executor, and everything whose size follows from what it states."""

    executor: Executor
    kv: KVManager
    rows: RowTable
    scheduler: Scheduler
    output_processor: StepOutputProcessor
    jump_forward: JumpForward


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
        hooks: Sequence[AdmissionHook] = (),
        stats: StatsSink | None = None,
        source: ExecutorSource | None = None,
        adapters: Adapters | None = None,
        weights: Weights | None = None,
        service: ServiceState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec.scheduler
        self.clock = clock
        self.hooks = AdmissionHooks(hooks)
        self.adapters = adapters
        self.weights = weights or Weights(no_weights)
        self.requests = RequestIndex()
        self.counters = Counters(clock())
        self.output_buffer = OutputBuffer()
        self.service = service or ServiceState()
        self._engine_spec = spec
        self._model = self._model_on(executor)
        self._control = Control(ExecutorLifecycle(source))
        self._stats = stats
        self._in_flight_steps: deque[tuple[InFlightStep, Pending]] = deque()
        self._depth = self.spec.stages if self.spec.overlap else 0
        self._deadlines = Deadlines()
        self.graphs = executor.facts.graphs
        self._arrivals = 0
        self.stall = StallWatch(self, lambda request: reason_of(self, request))

    def _model_on(self, executor: Executor) -> LoadedModel:
        facts = executor.facts
        kv = kv_manager_of(self._engine_spec, facts)
        rows = rows_of(self._engine_spec, min(self.spec.max_running, facts.max_rows))
        speculation = speculation_of(self._engine_spec.speculation, facts, kv, rows, self.hooks)
        parts = (kv, rows, self.hooks, self.service, self.clock, speculation)
        scheduler = scheduler_of(self.spec, *parts)
        speculation.watch(scheduler.queue)
        return LoadedModel(
            executor=executor,
            kv=kv,
            rows=rows,
            scheduler=scheduler,
            output_processor=StepOutputProcessor(
                rows, kv, self.hooks, self.output_buffer, self.counters, self.end, speculation
            ),
            jump_forward=JumpForward(
                rows, scheduler, self.output_buffer, end=self.end, now=self.clock
            ),
        )

    @property
    def executor(self) -> Executor:
        """The executor installed now."""
        return self._model.executor

    @property
    def kv(self) -> KVManager:
        """The KV blocks."""
        return self._model.kv

    @property
    def rows(self) -> RowTable:
        """The running requests as columns."""
        return self._model.rows

    @property
    def scheduler(self) -> Scheduler:
        """What chooses the requests of a step."""
        return self._model.scheduler

    def install(self, executor: Executor) -> None:
        """Goes on with another executor while nothing runs. Waiting requests keep their order; one
        that the new executor could never run ends with the reason."""
        waiting = list(self.scheduler.queue)
        if executor is not self.executor:
            self.weights.loaded()
        self._model = self._model_on(executor)
        self.graphs = executor.facts.graphs
        self.hooks.renew()
        for request in waiting:
            request.chain.clear()
            request.chain_start = b""
            self.scheduler.enqueue(request)
            try:
                request.length_limit = check_request(request.wire, executor.facts, self.kv)
            except HeadraceError as error:
                self.end(request, "error", error=to_wire(error))

    def hello(self) -> Hello:
        """What fronts must know to check requests."""
        return hello_of(self)

    @property
    def failing(self) -> str:
        """Why answers are not to be expected although requests are there, or ""."""
        if self.counters.failed_in_a_row >= FAILING_STEPS:
            return f"the last {FAILING_STEPS} steps or more failed for all of their requests"
        return self.stall.text if self.stall.stall is not None else ""

    @property
    def slow_step_s(self) -> float:
        """How long a step in flight may take before health fails. Read from another thread."""
        if self.spec.slow_step_s is not None:
            return self.spec.slow_step_s
        model = self.scheduler.prefill_budget
        expected = [
            model.expected_s(step.num_decodes, step.num_prefill_tokens)
            for step, _ in tuple(self._in_flight_steps)
        ]
        return max(LEAST_SLOW_STEP_S, SLOW_FACTOR * max(expected, default=0.0))

    # what fronts ask

    def add(self, request: EngineRequest) -> None:
        """Takes a request. One that cannot be taken is answered by an error in the next output."""
        self.stall.at = None
        try:
            self._admit(request)
        except Exception as error:
            self.counters.refused += 1
            self.output_buffer.add_finished(
                Finished(id=request.id, reason="error", error=to_wire(error))
            )

    def _admit(self, wire: EngineRequest) -> None:
        if wire.id in self.requests:
            raise Conflict(f"request {wire.id} is in flight already", field="id")
        load = load_of(self.scheduler, self.counters)
        check_open(self.service, load)
        facts = self.executor.facts
        length_limit = check_request(wire, facts, self.kv)
        check_policy(self.spec, wire)
        adapter, apart = BASE, bool(facts.media) or facts.pools_whole
        if wire.adapter or wire.media:
            wire, adapter = adapted(self.adapters, wire)
        request = Request(
            wire,
            arrival=self._arrivals,
            now=self.clock(),
            groups=len(facts.groups),
            length_limit=length_limit,
            adapter=adapter,
            uncut=uncut_spans(wire, facts, self.spec.max_step_tokens) if apart else (),
        )
        tokens = self.requests.prompt_tokens_of(wire.tenant)
        check_share(self.spec, load, tokens, request.num_prompt)
        self._check_queue(request, load)
        if load.is_full:
            check_deadline(load, wire, ahead=self.scheduler.ahead(request))
        self.hooks.admit(wire)
        self._arrivals += 1
        self.requests.add(request)
        self.scheduler.enqueue(request)
        self.output_buffer.add_new(request)
        if wire.deadline_s is not None:
            self._deadlines.forget_ended(self.requests, num_alive=len(self.requests))
            self._deadlines.add(request.arrived_at + latest_start_s(load, wire), wire.id)

    def _check_queue(self, request: Request, load: Load) -> None:
        try:
            check_queue(self.spec, load, request.num_prompt)
        except Unavailable as full:
            worst = worse_waiting(self.scheduler, request.wire)
            if worst is None:
                raise
            self.end(worst, "error", error=to_wire(full))

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests; ids that are not in flight are ignored."""
        self.stall.at = None
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.end(request, "abort")

    def call(self, call: Call) -> Reply | None:
        """A control call. None: the reply comes out of `step` once the operation is complete."""
        self.stall.at = None
        return self._control.call(self, call)

    # the loop

    @property
    def has_work(self) -> bool:
        """Whether `step` may do something now; if not, wait for a message, at most `idle_s`."""
        if self.output_buffer or self._in_flight_steps or self.idle_s == 0.0:
            return True
        if self.service.frozen or self.stall.at is not None:
            return False
        return self.scheduler.num_running > 0 or len(self.scheduler.queue) > 0

    @property
    def idle_s(self) -> float | None:
        """How long nothing happens by itself while `has_work` is false; None: for ever."""
        timers = [self._deadlines.first, self.service.drain_due, self.weights.poll_at]
        if self.stall.at is not None and (self.scheduler.queue or self.scheduler.num_running):
            timers.append(self.stall.look_again_at(hooks=bool(self.hooks)))
        if self.adapters is not None:
            timers.append(self.adapters.poll_at)
        due = [timer for timer in timers if timer is not None]
        return max(0.0, min(due) - self.clock()) if due else None

    def step(self, *, wait: bool, before_update: Callable[[], None] = lambda: None) -> CoreOutput:
        """Plans and submits a step if one may be in flight, and takes in the oldest that is done.

        With `wait` it blocks until that is done. `before_update` is called once the result is
        there: what it aborts gets none of the result's tokens. Raises EngineError if the workers
        failed: then call `fail_all`.
        """
        self.stall.at = None
        self._expire()
        steps = self._in_flight_steps
        launched = False
        if len(steps) <= self._depth:
            if not self.service.frozen:
                launched = self._launch()
            self.output_buffer.tell_queued()
        if steps and (not launched or len(steps) > self._depth):
            in_flight, pending = steps[0]
            if wait or pending.done():
                self._finish_step(in_flight, pending, before_update)
        if self._is_changing:
            self._control.advance(self)
        return self.output_buffer.take()

    @property
    def _is_changing(self) -> bool:
        """Whether operations look at the core behind every step."""
        held = not self.service.admits or self.service.draining
        return held or self.adapters is not None or self.weights.poll_at is not None

    def refuse_all(self, error: HeadraceError) -> None:
        """Ends everything with this error."""
        for request in list(self.requests):
            self.end(request, "error", error=to_wire(error))

    def fail_all(self, error: HeadraceError) -> CoreOutput:
        """Ends everything with this error: the workers are gone."""
        self._in_flight_steps.clear()
        self.refuse_all(error)
        self._control.advance(self)
        return self.output_buffer.take()

    def close(self) -> None:
        """Ends the workers."""
        self.executor.close()

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet taken in."""
        return len(self._in_flight_steps)

    @property
    def is_still(self) -> bool:
        """Whether nothing runs and nothing can begin: a pause of mode wait or abort is complete, or
        one of mode keep whose requests have gone back to the queue."""
        if self.service.pause is PauseMode.KEEP and self.scheduler.num_running:
            return False
        return self.service.pause is not None and not self._is_pausing

    @property
    def is_frozen(self) -> bool:
        """Whether a pause of mode keep is complete: rows are held, and none of them runs."""
        return self.service.pause is PauseMode.KEEP and not self._is_pausing

    @property
    def _is_pausing(self) -> bool:
        return not pause_is_complete(self)

    def put_back_all(self, reason: str) -> None:
        """Takes rows and blocks from all running requests; they wait in their old places."""
        self.scheduler.put_back_all(reason)

    def _launch(self) -> bool:
        begin = time.perf_counter()
        planned = self.scheduler.plan()
        self._end_unschedulable()
        if planned is None:
            if not self._in_flight_steps:
                self.stall.note()
            return False
        plan, in_flight = planned
        now = self.clock()
        self.counters.planned(now, rows=len(plan.rows), tokens=in_flight.num_tokens)
        host_s = time.perf_counter() - begin
        in_flight.submitted_at = now
        self._in_flight_steps.append((in_flight, self.executor.submit(plan)))
        self._send_deferred()
        self.counters.plan_s += host_s
        if self._stats is not None:
            self._stats.step(
                running=self.scheduler.num_running,
                waiting=len(self.scheduler.queue),
                tokens=in_flight.num_tokens,
                free_blocks=self.kv.pool.num_free,
                host_s=host_s,
                plan=plan,
            )
        return True

    def _end_unschedulable(self) -> None:
        """Ends the requests that the scheduler found can never go on."""
        for request, error in self.scheduler.unschedulable:
            if error is None:
                self.end(request, "length")
            elif request.state is not RequestState.FINISHED:
                self.end(request, "error", error=to_wire(error))
        self.scheduler.unschedulable.clear()

    def _finish_step(
        self, in_flight: InFlightStep, pending: Pending, before_update: Callable[[], None]
    ) -> None:
        """Takes in the result of the oldest step."""
        try:
            result = pending.result(self.spec.step_timeout_s)
        except TimeoutError:
            self.executor.check()
            raise EngineDead(f"a step took longer than {self.spec.step_timeout_s} s") from None
        before_update()
        begin, now = time.perf_counter(), self.clock()
        self._in_flight_steps.popleft()
        in_flight.seconds = self.scheduler.prefill_budget.observe(
            in_flight.submitted_at,
            now,
            decodes=in_flight.num_decodes,
            prefill_tokens=in_flight.num_prefill_tokens,
        )
        self._model.output_processor.process(in_flight, result, now)
        self.counters.update_s += time.perf_counter() - begin
        self._send_deferred()

    def _send_deferred(self) -> None:
        """Sends the deferred inputs of the oldest step in flight: all tokens before it are known
        now, and the workers compute it already. Rows that have changed hands since are left out."""
        if not self._in_flight_steps or not self._in_flight_steps[0][0].deferred:
            return
        in_flight, _ = self._in_flight_steps[0]
        live = (self.rows.epoch[in_flight.rows] == in_flight.epochs) & in_flight.sample
        rows = in_flight.rows[live]
        ids = self.rows.id[rows].tolist()
        drafts = self.scheduler.speculation.proposed_drafts(in_flight, live)
        payloads = self.hooks.deferred_payloads(in_flight.deferred, rows, ids, drafts)
        in_flight.deferred = ()
        self.executor.send_deferred(in_flight.step, payloads)
        forced = self._model.jump_forward.take(self.hooks, in_flight, self.requests.get)
        self.counters.output_tokens += forced
        self.counters.jump_forward_tokens += forced

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
        num_known = self.rows.count_known(request)
        self.requests.remove(request)
        self.scheduler.remove(request, forget=forget)
        request.move(RequestState.FINISHED, now=now)
        if self.hooks:
            self.hooks.finish(request.id)
        self.counters.ended(
            reason,
            num_prompt=request.num_prompt,
            num_cached=request.num_cached,
            num_output=num_known - request.num_prompt,
        )
        versions = self.weights.versions.since(request.scheduled_at or now)
        self.output_buffer.add_finished(
            finished_of(request, reason, versions, stop_id=stop_id, error=error, now=now)
        )
        if self._stats is not None:
            self._stats.finished(
                reason=reason,
                num_prompt=request.num_prompt,
                num_output=num_known - request.num_prompt,
                num_cached=request.num_cached,
            )

    def _expire(self) -> None:
        """Ends requests whose deadline has passed; one that still waits when it could no longer be
        finished in time never reaches the device."""
        now = self.clock()
        for request_id in self._deadlines.expired(now):
            request = self.requests.get(request_id)
            if request is None:
                continue
            due = request.arrived_at + (request.wire.deadline_s or 0.0)
            if due > now and request.state is not RequestState.WAITING:
                self._deadlines.add(due, request_id)
                continue
            passed = DeadlineExceeded(
                f"not finished within {request.wire.deadline_s} s "
                f"({request.state.value}: {reason_of(self, request)})",
                field="timeout_s",
            )
            self.end(request, "error", error=to_wire(passed))
