"""Chooses what runs in a step: decodes, then prefills that have begun, then waiting requests, under
one token budget.

It knows three things: the budget, the KV manager and the queue; everything else is a hook. A
waiting request holds nothing, the best running request can always take blocks from the others, and
what can never fit was refused: so every step makes progress while anything can run.

The steady state must stay within 150 us a step at 256 rows (benchmarks/host_cost.py): decodes are
handled as columns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.config.resolved import SchedulerSpec
from headrace.base.errors import HeadraceError
from headrace.base.wire.step import RowFeed, RowStart, StepPlan
from headrace.core.kv.manager import KVManager
from headrace.core.request import Request, RequestState, RowTable
from headrace.core.scheduler.budget import (
    PartialPrefillLimits,
    PrefillBudgetModel,
    StepBudget,
)
from headrace.core.scheduler.orders import order_of
from headrace.core.scheduler.plan_builder import InFlightStep, Speculation, StepPlanBuilder
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.service_state import ServiceState

MAX_LOOKS = 64  # waiting requests tried in one step: bounds the host's work when the pool is full
RETRY_STEPS = 16
"""One that did not fit is looked at again after so many steps, or when enough blocks are free."""

Intp = npt.NDArray[np.intp]


class Scheduler:
    """Makes plans. `unschedulable`: requests that a hook or the pool will never let run, with the
    error, and, without one, running ones that can grow no further and hold all their tokens."""

    def __init__(
        self,
        spec: SchedulerSpec,
        kv: KVManager,
        rows: RowTable,
        hooks: AdmissionHooks,
        service: ServiceState,
        now: Callable[[], float],
        speculation: Speculation,
    ) -> None:
        self.spec = spec
        self.speculation = speculation
        self.kv = kv
        self.rows = rows
        self.hooks = hooks
        self.queue, self.key = order_of(spec, num_rows=rows.num_rows, match=kv.match)
        self.prefill_budget = PrefillBudgetModel(
            spec.max_decode_slowdown,
            max_tokens=spec.max_step_tokens,
            block_tokens=kv.block_tokens,
        )
        self._partial_prefills = PartialPrefillLimits(spec)
        self.prefilling: list[Request] = []
        self._service = service
        self.unschedulable: list[tuple[Request, HeadraceError | None]] = []
        self.num_preemptions = 0
        self.step = 0
        self._resuming: list[tuple[Request, int, int]] = []
        self._ends: list[int] = []
        self._turn = 0
        self._now = now

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return self.rows.num_rows - self.rows.num_free

    def running(self) -> list[Request]:
        """The requests that own a row."""
        return [request for request in self.rows.requests if request is not None]

    def ahead(self, request: Request) -> int:
        """About how many waiting requests would start before a new one."""
        request.key = self.key(request)
        return self.queue.ahead(request)

    def enqueue(self, request: Request) -> None:
        """A new request waits for its turn."""
        request.key = self.key(request)
        self.queue.push(request)

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """Takes a request out, wherever it is, with everything it holds; with `forget` its KV
        cannot be found again."""
        if request.row < 0:
            self.queue.remove(request)
            return
        if request.state is RequestState.PREFILL:
            self.prefilling.remove(request)
        self.queue.ended(request)
        self.kv.release(request, forget=forget)
        self._ends.append(self.rows.release(request))

    def plan(self) -> tuple[StepPlan, InFlightStep] | None:
        """The next step, or None if nothing can run now."""
        budget = StepBudget(self.spec, self.prefill_budget)
        builder = StepPlanBuilder(self.rows)
        self._decode(builder, budget)
        if self._resuming:
            self._resume(builder, budget)
        self._go_on_with_prefills(builder, budget)
        self._admit_waiting(builder, budget)
        if not builder.num_rows:
            return None
        self.speculation.add_drafts(builder)
        self.step += 1
        ends, self._ends = self._ends, []
        plan, in_flight = builder.finish(self.step, ends)
        if self.hooks:
            ids = self.rows.id[plan.rows].tolist()
            in_flight.deferred = self.hooks.deferring(ids)
            payloads = self.hooks.payloads(ids)
            plan = msgspec.structs.replace(
                plan, hook_payloads=payloads, deferred=in_flight.deferred
            )
        return plan, in_flight

    # rows that were given tokens

    def resume(self, request: Request) -> None:
        """A request that decoded knows tokens whose KV is missing: they run as one chunk, then it
        decodes on."""
        row = request.row
        self._resuming.append((request, row, int(self.rows.epoch[row])))

    def _resume(self, builder: StepPlanBuilder, budget: StepBudget) -> None:
        waiting, self._resuming = self._resuming, []
        for request, row, epoch in waiting:
            if self.rows.epoch[row] != epoch:
                continue  # it has ended, or was preempted
            if not budget.left or not self._run_resumed(builder, budget, request):
                self._resuming.append((request, row, epoch))

    def _run_resumed(self, builder: StepPlanBuilder, budget: StepBudget, request: Request) -> bool:
        """The next chunk of a row that resumes; whether that was all. (One that lost its row is
        left out later.)"""
        row = request.row
        start, known = int(self.rows.num_planned_tokens[row]), int(self.rows.num_known_tokens[row])
        builder.add_updates(request, self.kv.trim(request, start))
        if not self._room_to_go_on(builder, request, start):
            return False
        tokens = self.kv.fit(request, start=start, want=min(known - start, budget.left))
        budget.spend_resumed(tokens)
        self.queue.charge(np.full(tokens, row, np.intp))
        fed = np.frombuffer(request.token_bytes(start, start + tokens), "<i4")
        builder.add_feed(RowFeed(row=row, start=start, tokens=fed), request)
        return self._run_chunk(builder, request, start=start, tokens=tokens)

    # decodes

    def _decode(self, builder: StepPlanBuilder, budget: StepBudget) -> None:
        """All that decode."""
        rows = self._affordable(self.rows.to_decode(), budget.for_decodes(bool(self._resuming)))
        if not len(rows):
            return
        planned = self.rows.num_planned_tokens[rows]
        crossing = rows[(planned + self.kv.tokens_ahead) % self.kv.block_tokens == 0]
        if len(crossing):
            crossing = self.speculation.lacking_blocks(crossing)
        if len(crossing):
            rows = self._grow_all(builder, rows, crossing)
            planned = self.rows.num_planned_tokens[rows]
        builder.add_decodes(rows, planned)
        budget.spend_decodes(len(rows))
        self.queue.charge(rows)

    def _affordable(self, rows: Intp, tokens: int) -> Intp:
        """All rows, or as many as the budget allows, in turns."""
        if len(rows) <= tokens:
            return rows
        chosen = np.roll(rows, -(self._turn % len(rows)))[:tokens]
        self._turn += tokens
        return np.sort(chosen)

    def _grow_all(self, builder: StepPlanBuilder, rows: Intp, crossing: Intp) -> Intp:
        """Gives each crossing row its next block; returns the rows that still run after
        preemptions."""
        owners = [self.rows.owner(row) for row in crossing.tolist()]
        positions = self.rows.num_planned_tokens[crossing]
        if self.kv.trims:
            for request in owners:
                position = self.rows.least_planned(request.row)
                builder.add_updates(request, self.kv.trim(request, position))
        if self.kv.can_extend_each(owners, positions):
            builder.add_decode_blocks(self.kv.extend_each(crossing, owners, positions))
            return rows
        stalled = {
            request.id
            for request in sorted(owners, key=attrgetter("key"))
            if not self._grow(builder, request)
        }
        running = [row for row in rows.tolist() if self._still_runs(row, stalled)]
        return np.asarray(running, np.intp)

    def _still_runs(self, row: int, stalled: set[int]) -> bool:
        request = self.rows.requests[row]
        return request is not None and request.id not in stalled

    def _grow(self, builder: StepPlanBuilder, request: Request) -> bool:
        """One more block for a decoding row, if need be from a request that comes after it; False:
        it does not run."""
        if request.row < 0:
            return False  # preempted a moment ago for a better one
        start = int(self.rows.num_planned_tokens[request.row])
        if not self._room_to_go_on(builder, request, start):
            return False
        builder.add_updates(request, self.kv.extend(request, start + 1))
        return True

    def _room_to_go_on(self, builder: StepPlanBuilder, request: Request, start: int) -> bool:
        """Makes sure of room for a token at `start`; without it the request loses its row, or ends
        if it is alone."""
        if self._make_room(builder, request, start):
            return True
        if self.num_running > 1 or self.kv.compacts(request, start + 1):
            self._preempt(builder, request)
        else:
            self._end_where_it_is(request)
        return False

    def _end_where_it_is(self, request: Request) -> None:
        """Alone and out of blocks: what it has is its length. A token in flight still
        counts."""
        row = request.row
        self.rows.limit[row] = self.rows.length[row]
        if self.rows.num_known_tokens[row] == self.rows.length[row]:
            self.unschedulable.append((request, None))

    def _make_room(self, builder: StepPlanBuilder, request: Request, start: int) -> bool:
        """Whether `request` has room for its least chunk from `start` on; those that come after it
        are preempted for that."""
        least = request.least_chunk(start)
        while self.kv.fit(request, start=start, want=least) < least:
            victim = max(self.running(), key=attrgetter("key"))
            if victim is request:
                return False
            self._preempt(builder, victim)
        return True

    def _preempt(self, builder: StepPlanBuilder, request: Request) -> None:
        """Takes row and blocks from a request for those that come before it."""
        self._put_back(request, "preempted: its KV blocks went to requests before it")
        builder.preempted.add(request.id)

    def put_back_all(self, reason: str) -> None:
        """Between two plans: every row is given back, and what ran waits in its old place."""
        for request in self.running():
            self._put_back(request, reason)

    def _put_back(self, request: Request, reason: str) -> None:
        """Takes row and blocks from a request; it waits in its old place and is computed again.
        What is in flight for it is void: a token's randomness depends on its position alone, so
        that it comes out the same."""
        if request.state is RequestState.PREFILL:
            self.prefilling.remove(request)
        self.rows.flush_rest(request)
        request.lose_row(reason, step=self.step, now=self._now())
        self.num_preemptions += 1
        self.queue.push(request)
        self.queue.ended(request)
        self.kv.release(request)
        self._ends.append(self.rows.release(request))

    # prefills

    def _go_on_with_prefills(self, builder: StepPlanBuilder, budget: StepBudget) -> None:
        for request in tuple(self.prefilling):
            if request.row < 0:
                continue  # preempted a moment ago
            if not budget.prefill_may_join:
                return
            start = int(self.rows.num_planned_tokens[request.row])
            builder.add_updates(request, self.kv.trim(request, start))
            if budget.affords(request, start) and self._room_for_chunk(builder, request):
                self._prefill(builder, budget, request)

    def _room_for_chunk(self, builder: StepPlanBuilder, request: Request) -> bool:
        start = int(self.rows.num_planned_tokens[request.row])
        if self._make_room(builder, request, start):
            return True
        request.reason = "running: waits for KV blocks of requests before it"
        if self.num_running > 1:
            return False
        if self.kv.compacts(request, start + 1):
            self._preempt(builder, request)
        else:
            self.unschedulable.append((request, self.kv.never_fits(request.num_tokens)))
        return False

    def _prefill(self, builder: StepPlanBuilder, budget: StepBudget, request: Request) -> None:
        """Puts the next chunk of a prefill into the step."""
        row = request.row
        start, known = int(self.rows.num_planned_tokens[row]), int(self.rows.num_known_tokens[row])
        want = self._partial_prefills.chunk(request, start, min(known - start, budget.prefill_left))
        tokens = request.whole_chunk(start, self.kv.fit(request, start=start, want=want))
        assert tokens > 0, (request.id, start, known, budget.prefill_left)
        budget.spend_prefill(tokens)
        request.reason = "running: prefill"
        if self._run_chunk(builder, request, start=start, tokens=tokens):
            self.prefilling.remove(request)
            request.move(RequestState.DECODE, now=self._now())

    def _run_chunk(
        self, builder: StepPlanBuilder, request: Request, *, start: int, tokens: int
    ) -> bool:
        """Puts known tokens of a row into the step; whether these were the last, behind which it
        decodes."""
        row, known = request.row, int(self.rows.num_known_tokens[request.row])
        builder.add_updates(request, self.kv.extend(request, start + tokens))
        last = start + tokens == known
        sample = last and known < int(self.rows.limit[row])
        builder.add_prefill(request, start=start, tokens=tokens, sample=sample)
        self.rows.num_planned_tokens[row] = start + tokens
        if last:
            self.rows.length[row] = known + sample
            self.rows.decoding[row] = sample
        return last

    # waiting requests

    def _admit_waiting(self, builder: StepPlanBuilder, budget: StepBudget) -> None:
        if not self.queue:
            return
        looks = 0
        for request in self.queue.scan():
            if looks == MAX_LOOKS or not self.rows.num_free:
                return
            if not budget.prefill_may_join or not budget.holds(request.num_tokens):
                return
            if (request.id in builder.preempted and self.num_running) or self._held(request):
                continue
            looks += 1
            hit = self._hit_to_start(request)
            if hit is not None:
                if not budget.affords(request, hit * self.kv.block_tokens):
                    return
                self._start(builder, budget, request, hit)
            elif request.passed_over >= self.spec.ageing_steps:
                request.reason += "; blocks that become free are kept for it"
                return

    def _held(self, request: Request) -> bool:
        """Whether a pause, the bound of partial prefills or a hook keeps it back; none makes it
        age, for freed blocks would not help it."""
        if not self._service.admits and request.scheduled_at is None:
            request.reason = "paused"
            return True
        refusal = self._partial_prefills.refusal(request, self.prefilling)
        if refusal is None and self.hooks:
            refusal = self._ask_hooks(request)
        if refusal is None:
            return False
        request.reason = refusal
        return True

    def _ask_hooks(self, request: Request) -> str | None:
        refusal, error = self.hooks.refusal(
            request.id, lambda: self.kv.match(request) * self.kv.block_tokens
        )
        request.note_hook(opens=refusal is None, now=self._now())
        if error is not None:
            self.unschedulable.append((request, error))
        return refusal

    def _hit_to_start(self, request: Request) -> int | None:
        """The prefix hit with which it starts, in blocks; None if the pool does not hold all its
        tokens beside a block for each decoding row to grow. A request that is alone need not have
        it all at once. (A prefill under way is owed blocks too, but uses up the budget before.)"""
        if self._looked_at_lately(request):
            request.passed_over += 1
            return None
        request.looked_at_step = self.step
        hit = self.kv.match(request)
        if self.num_running == 0:
            return hit if self.kv.can_begin(request, hit) else self._whole_to_start(request)
        growing = self.num_running - len(self.prefilling)
        need = self.kv.need(request, hit, growing=growing)
        if need.fits:
            return hit
        request.need_blocks = need.units + need.headroom
        request.passed_over += 1
        request.reason = (
            f"KV {self.kv.pool.unit}: needs {need.units}, free {self.kv.pool.num_free}, "
            f"of which {need.headroom} are kept for running requests"
        )
        return None

    def _whole_to_start(self, request: Request) -> int | None:
        """Without a hit, where it is alone; None while copies of KV hold even the blocks that its
        first token needs."""
        if self.kv.can_begin(request, 0):
            return 0
        request.reason = f"KV {self.kv.pool.unit}: {self.kv.pool.num_free} free, though none runs"
        return None

    def _looked_at_lately(self, request: Request) -> bool:
        lately = 0 <= self.step - request.looked_at_step < RETRY_STEPS and request.need_blocks > 0
        return lately and self.num_running > 0 and self.kv.pool.num_free < request.need_blocks

    def _start(
        self, builder: StepPlanBuilder, budget: StepBudget, request: Request, hit: int
    ) -> None:
        computed = hit * self.kv.block_tokens
        row = self.rows.acquire(request, computed=computed)
        if request.scheduled_at is None:
            request.scheduled_at = self._now()
            request.num_cached = computed
        self.queue.started(request)
        self.queue.remove(request)
        request.move(RequestState.PREFILL, now=self._now())
        self.speculation.start(row, request)
        request.passed_over = request.need_blocks = 0
        insort(self.prefilling, request, key=attrgetter("key"))
        start = RowStart(
            row=row,
            request=request.id,
            tokens=request.tokens(),
            num_prompt=request.num_prompt,
            num_computed=computed,
            sampling=request.wire.sampling,
            pooling=request.wire.pooling,
            prediction=request.wire.prediction,
            media=request.media,
            adapter_slot=request.adapter.slot,
            length_limit=request.length_limit,
        )
        if self.kv.spans:
            cross = self.kv.cross_tokens(request)
            start = msgspec.structs.replace(start, encoder=request.wire.encoder, cross_tokens=cross)
        builder.add_start(start, request)
        builder.add_updates(request, self.kv.attach(request, hit))
        self._prefill(builder, budget, request)
