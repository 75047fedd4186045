"""Chooses what runs in a step: decodes, then prefills that have begun, then waiting requests, under one token budget.

It knows three things: the budget, the KV manager and the queue; everything else is a gate. A waiting request holds
nothing, the best running request can always take blocks from the others, and what can never fit was refused: from
these three follows that every step makes progress while anything can run.

The steady state must stay within 150 us a step at 256 rows (benchmarks/host_cost.py): decodes are handled as columns.
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
from headrace.core.request import Request, State
from headrace.core.rows import RowTable
from headrace.core.scheduler.budget import StepBudget
from headrace.core.scheduler.draft import Draft, Flight
from headrace.core.scheduler.gates import Gates
from headrace.core.scheduler.pace import Pace
from headrace.core.scheduler.policy import key_of, queue_of

MAX_LOOKS = 64  # waiting requests tried in one step: bounds the host's work when the pool is full
MAX_PREEMPTIONS_TOLD = 16  # times kept of one request's preemptions
RETRY_STEPS = 16  # a request that did not fit is looked at again after so many steps, or when enough blocks are free

Intp = npt.NDArray[np.intp]


class Scheduler:
    """Makes plans. `hopeless` collects what has no future: requests that a gate or the pool will never let run, with
    the error, and, without one, running requests that can grow no further and hold all their tokens."""

    def __init__(
        self,
        spec: SchedulerSpec,
        kv: KVManager,
        rows: RowTable,
        gates: Gates,
        now: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.kv = kv
        self.rows = rows
        self.gates = gates
        self.queue = queue_of(spec.policy, num_rows=rows.num_rows)
        self.key = key_of(spec.policy)
        self.pace = Pace(
            spec.decode_stretch, max_tokens=spec.max_step_tokens, block_tokens=kv.block_tokens
        )
        self.prefilling: list[Request] = []
        self.admit_new = True
        self.hopeless: list[tuple[Request, HeadraceError | None]] = []
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

    def enqueue(self, request: Request) -> None:
        """A new request waits for its turn."""
        request.key = self.key(request)
        self.queue.push(request)

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """Takes a request out, wherever it is, with everything it holds; with `forget` its KV cannot be found again."""
        if request.row < 0:
            self.queue.remove(request)
            return
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
        self.queue.ended(request)
        self.kv.release(request, forget=forget)
        self._ends.append(self.rows.release(request))

    def plan(self) -> tuple[StepPlan, Flight] | None:
        """The next step, or None if nothing can run now."""
        budget = StepBudget(self.spec, self.pace)
        draft = Draft(self.rows)
        self._decode(draft, budget)
        if self._resuming:
            self._resume(draft, budget)
        self._go_on_with_prefills(draft, budget)
        self._admit_waiting(draft, budget)
        if not draft.num_rows:
            return None
        self.step += 1
        ends, self._ends = self._ends, []
        plan, flight = draft.finish(self.step, ends)
        if self.gates:
            ids = self.rows.id[plan.rows].tolist()
            flight.late = self.gates.followers(ids)
            payloads = self.gates.payloads(ids)
            plan = msgspec.structs.replace(plan, gates=payloads, late=flight.late)
        return plan, flight

    # rows that were given tokens

    def resume(self, request: Request) -> None:
        """A request that decoded knows tokens whose KV is missing: they run as one chunk, then it decodes on."""
        row = request.row
        self._resuming.append((request, row, int(self.rows.epoch[row])))

    def _resume(self, draft: Draft, budget: StepBudget) -> None:
        waiting, self._resuming = self._resuming, []
        for request, row, epoch in waiting:
            if self.rows.epoch[row] != epoch:
                continue  # it has ended, or was preempted
            if not budget.left or not self._run_resumed(draft, budget, request):
                self._resuming.append((request, row, epoch))

    def _run_resumed(self, draft: Draft, budget: StepBudget, request: Request) -> bool:
        """The next chunk of a row that resumes; whether that was all. (One that lost its row is left out later.)"""
        row = request.row
        start, known = int(self.rows.planned[row]), int(self.rows.known[row])
        draft.add_updates(request, self.kv.trim(request, start))
        if not self._room_to_go_on(draft, request, start):
            return False
        tokens = self.kv.fit(request, start=start, want=min(known - start, budget.left))
        budget.spend_resumed(tokens)
        self.queue.charge(np.full(tokens, row, np.intp))
        given = np.frombuffer(request.token_bytes(start, start + tokens), "<i4")
        draft.add_feed(RowFeed(row=row, start=start, tokens=given), request)
        return self._run_chunk(draft, request, start=start, tokens=tokens)

    # decodes

    def _decode(self, draft: Draft, budget: StepBudget) -> None:
        """All that decode; a token is left to those that resume, so that these come to decode again."""
        rows = self._affordable(self.rows.to_decode(), budget.left - bool(self._resuming))
        if not len(rows):
            return
        planned = self.rows.planned[rows]
        crossing = rows[planned % self.kv.block_tokens == 0]
        if len(crossing):
            rows = self._grow_all(draft, rows, crossing)
            planned = self.rows.planned[rows]
        draft.add_decodes(rows, planned)
        budget.spend_decodes(len(rows))
        self.queue.charge(rows)

    def _affordable(self, rows: Intp, tokens: int) -> Intp:
        """All rows, or as many as the budget allows, in turns."""
        if len(rows) <= tokens:
            return rows
        chosen = np.roll(rows, -(self._turn % len(rows)))[:tokens]
        self._turn += tokens
        return np.sort(chosen)

    def _grow_all(self, draft: Draft, rows: Intp, crossing: Intp) -> Intp:
        """Gives each crossing row its next block; returns the rows that still run after preemptions."""
        owners = [self.rows.owner(row) for row in crossing.tolist()]
        if self.kv.windows:
            for request in owners:
                draft.add_updates(
                    request, self.kv.trim(request, int(self.rows.planned[request.row]))
                )
        if self.kv.pool.num_free >= len(owners) * len(self.kv.kinds):
            draft.add_decode_blocks(crossing, *self.kv.extend_each(owners))
            return rows
        stalled = {
            request.id
            for request in sorted(owners, key=attrgetter("key"))
            if not self._grow(draft, request)
        }
        running = [row for row in rows.tolist() if self._still_runs(row, stalled)]
        return np.asarray(running, np.intp)

    def _still_runs(self, row: int, stalled: set[int]) -> bool:
        request = self.rows.requests[row]
        return request is not None and request.id not in stalled

    def _grow(self, draft: Draft, request: Request) -> bool:
        """One more block for a decoding row, if need be from a request that comes after it; False: it does not run."""
        if request.row < 0:
            return False  # preempted a moment ago for a better one
        start = int(self.rows.planned[request.row])
        if not self._room_to_go_on(draft, request, start):
            return False
        draft.add_updates(request, self.kv.extend(request, start + 1))
        return True

    def _room_to_go_on(self, draft: Draft, request: Request, start: int) -> bool:
        """Makes sure of room for a token at `start`; without it the request loses its row, or ends if it is alone."""
        if self.kv.fit(request, start=start, want=1) or self._make_room(draft, request):
            return True
        if self.num_running == 1:
            self._end_where_it_is(request)
        else:
            self._preempt(draft, request)
        return False

    def _end_where_it_is(self, request: Request) -> None:
        """Alone and out of blocks: what it has is its length (ENG-04). A token in flight still counts."""
        row = request.row
        self.rows.limit[row] = self.rows.length[row]
        if self.rows.known[row] == self.rows.length[row]:
            self.hopeless.append((request, None))

    def _make_room(self, draft: Draft, request: Request) -> bool:
        """Makes one block per group free for `request` by preempting those that come after it."""
        needed = len(self.kv.kinds)
        while self.kv.pool.num_free < needed:
            victim = max(self.running(), key=attrgetter("key"))
            if victim is request:
                return False
            self._preempt(draft, victim)
        return True

    def _preempt(self, draft: Draft, request: Request) -> None:
        """Takes row and blocks from a request for those that come before it."""
        self._put_back(request, "preempted: its KV blocks went to requests before it")
        draft.preempted.add(request.id)

    def put_back_all(self, reason: str) -> None:
        """Between two plans: every row is given back, and what ran waits in its old place."""
        for request in self.running():
            self._put_back(request, reason)

    def _put_back(self, request: Request, reason: str) -> None:
        """Takes row and blocks from a request; it waits in its old place and is computed again. What is in flight for
        it is void: a token's randomness depends on its position alone, so that it comes out the same."""
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
        self.rows.flush_rest(request)
        request.num_preemptions += 1
        if request.num_preemptions <= MAX_PREEMPTIONS_TOLD:
            request.preempted_at = (*request.preempted_at, self._now())
        self.num_preemptions += 1
        request.move(State.PREEMPTED, now=self._now())
        request.reason = reason
        request.looked_at_step = self.step
        self.queue.push(request)
        self.queue.ended(request)
        self.kv.release(request)
        self._ends.append(self.rows.release(request))

    # prefills

    def _go_on_with_prefills(self, draft: Draft, budget: StepBudget) -> None:
        for request in tuple(self.prefilling):
            if request.row < 0:
                continue  # preempted a moment ago
            if not budget.prefill_may_join:
                return
            draft.add_updates(request, self.kv.trim(request, int(self.rows.planned[request.row])))
            if self._room_for_chunk(draft, request):
                self._prefill(draft, budget, request)

    def _room_for_chunk(self, draft: Draft, request: Request) -> bool:
        start = int(self.rows.planned[request.row])
        if self.kv.fit(request, start=start, want=1) or self._make_room(draft, request):
            return True
        request.reason = "running: waits for KV blocks of requests before it"
        if self.num_running == 1:
            self.hopeless.append((request, self.kv.never_fits(request.num_tokens)))
        return False

    def _prefill(self, draft: Draft, budget: StepBudget, request: Request) -> None:
        """Puts the next chunk of a prefill into the step."""
        row = request.row
        start, known = int(self.rows.planned[row]), int(self.rows.known[row])
        tokens = self.kv.fit(request, start=start, want=min(known - start, budget.prefill_left))
        assert tokens > 0, (request.id, start, known, budget.prefill_left)
        budget.spend_prefill(tokens)
        request.reason = "running: prefill"
        if self._run_chunk(draft, request, start=start, tokens=tokens):
            self.prefilling.remove(request)
            request.move(State.DECODE, now=self._now())

    def _run_chunk(self, draft: Draft, request: Request, *, start: int, tokens: int) -> bool:
        """Puts known tokens of a row into the step; whether these were the last, behind which it decodes."""
        row, known = request.row, int(self.rows.known[request.row])
        draft.add_updates(request, self.kv.extend(request, start + tokens))
        last = start + tokens == known
        sample = last and known < int(self.rows.limit[row])
        draft.add_prefill(request, start=start, tokens=tokens, sample=sample)
        self.rows.planned[row] = start + tokens
        if last:
            self.rows.length[row] = known + sample
            self.rows.decoding[row] = sample
        return last

    # waiting requests

    def _admit_waiting(self, draft: Draft, budget: StepBudget) -> None:
        if not self.queue:
            return
        looks = 0
        for request in self.queue.scan():
            if looks == MAX_LOOKS or not self.rows.num_free:
                return
            if not budget.prefill_may_join or not budget.holds(request.num_tokens):
                return
            if request.id in draft.preempted or self._held(request):
                continue
            looks += 1
            if self._may_start(request):
                self._start(draft, budget, request)
            elif request.passed_over >= self.spec.ageing_steps:
                request.reason += "; blocks that become free are kept for it"
                return

    def _held(self, request: Request) -> bool:
        """Whether a pause or a gate keeps it back; neither makes it age, for freed blocks would not help it."""
        if not self.admit_new and request.scheduled_at is None:
            request.reason = "paused"
            return True
        refusal = self._ask_gates(request) if self.gates else None
        if refusal is None:
            return False
        request.reason = refusal
        return True

    def _ask_gates(self, request: Request) -> str | None:
        refusal, error = self.gates.refusal(request.id)
        request.note_gate(opens=refusal is None, now=self._now())
        if error is not None:
            self.hopeless.append((request, error))
        return refusal

    def _may_start(self, request: Request) -> bool:
        """Whether the pool holds all its tokens beside a block for each decoding row to grow. A request that is alone
        need not have it all at once. (A prefill under way is owed blocks too, but uses up the budget before this.)"""
        pool = self.kv.pool
        if self._looked_at_lately(request):
            request.passed_over += 1
            return False
        request.looked_at_step = self.step
        hit = self.kv.match(request)
        needed = self.kv.need(request, hit)
        headroom = (self.num_running - len(self.prefilling)) * len(self.kv.kinds)
        if self.num_running == 0 or needed + headroom <= pool.num_free:
            return True
        request.need_blocks = needed + headroom
        request.passed_over += 1
        request.reason = (
            f"KV blocks: needs {needed}, free {pool.num_free}, "
            f"of which {headroom} are kept for running requests"
        )
        return False

    def _looked_at_lately(self, request: Request) -> bool:
        lately = 0 <= self.step - request.looked_at_step < RETRY_STEPS and request.need_blocks > 0
        return lately and self.num_running > 0 and self.kv.pool.num_free < request.need_blocks

    def _start(self, draft: Draft, budget: StepBudget, request: Request) -> None:
        hit = self.kv.match(request)
        computed = hit * self.kv.block_tokens
        row = self.rows.acquire(request, computed=computed)
        if request.scheduled_at is None:
            request.scheduled_at = self._now()
            request.num_cached = computed
        self.queue.started(request)
        self.queue.remove(request)
        request.move(State.PREFILL, now=self._now())
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
        )
        draft.add_start(start, request)
        draft.add_updates(request, self.kv.attach(request, hit))
        self._prefill(draft, budget, request)
