"""How many drafts each decoding row verifies in a step (`Speculation`, plan_builder.py).

A step is planned as if nothing were drafted; then, if all its rows decode, each gets as many drafts
as its own take pays for. So the token budget schedules what it schedules without speculation, and
the forward pass has a capacity of its own. Drafts never cost anybody a row: a block is taken for
them only while each decoding row could still have its next one, and they end at the request's
length limit.

A row's tokens must not depend on who drafts: every draft is sampled as its place would be without
(back/kernels/step_verify). What cannot be sampled ahead drafts nothing: rows whose layers are
captured, and rows with functions of extensions.

Masks of grammars follow the tokens one by one. So the drafts of such a row must be known when the
masks are made: the workers tell them behind the step before (StepResult.proposed), and the hook
makes a mask for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import numpy as np
import numpy.typing as npt

from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import StepResult, WorkerFacts
from headrace.core.kv.manager import KVManager
from headrace.core.request import Request, RowTable
from headrace.core.scheduler.draft_prices import LEAST, SHARED, DraftPrices, is_probe
from headrace.core.scheduler.plan_builder import (
    DraftStats,
    InFlightStep,
    NoSpeculation,
    Speculation,
    StepPlanBuilder,
)
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.scheduler.whole_blocks import WholeBlocks

KEEP = 0.9  # share of its weight that what became of a row's drafts keeps at its next ones,
KEEP_ALL = 0.98  # and what became of those of all rows, step by step
FIRST_CHANCE = 0.8  # that a draft stands, before any was tried
PROBE_RUNS = 64  # where drafts do not pay, of so many runs of steps one tries them
LEAST_PROBE_RUNS = 8  # or one of fewer,
PROBE_SHARE = 0.01  # as long as that costs no more than this share of the tokens
SURE = 5  # measurements of steps with drafts before that; the first may have been held up
RETRY_STEPS = 16  # and where they pay, of so many one tries rows that have none
OTHERS = 3.0  # drafts for which the chance of all rows counts beside a row's own
FIRST_WEIGHT = 10.0  # drafts for which the first chance counts
MARGIN = 1.25  # so many times what they cost drafts are to bring: neither is known exactly

Int32 = npt.NDArray[np.int32]
Intp = npt.NDArray[np.intp]
Bool = npt.NDArray[np.bool_]
_NONE = np.zeros(0, np.int32)


class DraftLengths:
    """Drafts by what a row's last ones were worth: twice as many, and one, after all stood; as many
    as stood, and one, after some did; half as many, at least one, after none did.

    If `adaptive`, of these only as many as are worth their price: the k-th draft of a row stands
    with the k-th power of the chance that its drafts had lately, and what a step is expected to
    gain must be above what its drafts cost (Leviathan 2023, section 3.3, with both measured). Now
    and then a step is plain, or has drafts that are not expected to pay, so that both stay known.

    `max_drafts`: of a row in a step, as many as both the options and the workers allow.

    Where more requests run and wait than a step with drafts may have rows, no network follows the
    steps: their prompts would be followed for drafts that are never made. A row for which a network
    proposes nothing is one that it has lost in such steps, and is planned without drafts from then
    on; but for rows whose masks may forbid them all.
    """

    def __init__(
        self,
        spec: SpeculationSpec,
        kv: KVManager,
        rows: RowTable,
        *,
        max_drafts: int,
        may_draft: Callable[[EngineRequest], bool],
    ) -> None:
        self._max_rows = spec.max_rows
        self._may_draft = may_draft
        self._kv = kv
        self._rows = rows
        self._most = np.zeros(rows.num_rows, np.int32)
        self._next = np.zeros(rows.num_rows, np.int32)
        self._max_drafts = max_drafts
        self._proposed = np.full((rows.num_rows, max_drafts), -1, np.int32)
        self._proposed_at = np.full(rows.num_rows, -1, np.int32)
        self._stats = DraftStats(max_drafts)
        self._prices = DraftPrices() if spec.adaptive else None
        self._stood = np.zeros(rows.num_rows)
        self._predicted = np.zeros(rows.num_rows, bool)
        self._loses = np.zeros(rows.num_rows, bool)
        self._follows = spec.model is not None
        self._tried = np.zeros(rows.num_rows)
        self._all_stood, self._all_tried = FIRST_WEIGHT * FIRST_CHANCE, FIRST_WEIGHT
        self._unpaid = 0  # for so many rows nothing pays until something is learned
        self._waiting: Sized = ()

    @property
    def stats(self) -> DraftStats:
        """See Speculation."""
        return self._stats

    def watch(self, waiting: Sized) -> None:
        """See Speculation."""
        self._waiting = waiting

    def start(self, row: int, request: Request) -> None:
        """See Speculation."""
        self._most[row] = self._next[row] = self._max_drafts if self._may_draft(request.wire) else 0
        self._proposed_at[row] = -1
        self._predicted[row] = bool(request.wire.prediction)
        self._loses[row] = self._follows and not request.wire.hook_payloads
        self._stood[row] = self._tried[row] = 0.0
        self._unpaid = 0

    def lacking_blocks(self, crossing: Intp) -> Intp:
        """See Speculation: a block may have been taken for drafts that did not stand."""
        rows = self._rows
        lacking = [
            row
            for row in crossing.tolist()
            if self._kv.held_tokens(rows.owner(row)) <= rows.num_planned_tokens[row]
        ]
        return np.asarray(lacking, np.intp)

    def add_drafts(self, builder: StepPlanBuilder) -> None:
        """See Speculation."""
        running = self._rows.num_rows - self._rows.num_free
        builder.followed = running + len(self._waiting) <= self._max_rows
        decoding = builder.decodes
        if not 0 < len(decoding) <= self._max_rows:
            return
        rows = self._rows
        room = rows.limit[decoding] - rows.length[decoding]
        if self._prices is None:
            drafts = np.minimum(self._next[decoding], room)
        else:
            drafts = self._worthwhile(
                self._prices, decoding, np.minimum(self._most[decoding], room)
            )
        planned = rows.num_planned_tokens[decoding]
        pool, next_blocks = self._kv.pool, [len(decoding)] * len(self._kv.kinds)
        behind = -planned % self._kv.block_tokens  # room in the block of the newest token
        for place in np.flatnonzero(drafts > behind).tolist():
            request = rows.owner(int(decoding[place]))
            spare = pool.fits(next_blocks)
            drafts[place] = self._extend(
                builder, request, int(planned[place]), int(drafts[place]), spare=spare
            )
        if drafts.any():
            builder.add_drafts(drafts.astype(np.int32))

    def _worthwhile(self, prices: DraftPrices, decoding: Intp, most: Int32) -> Int32:
        """Of `most` drafts of each row those that pay."""
        best, best_net = np.zeros_like(most), 0.0
        if not most.any():
            return best
        rows, turn = len(decoding), prices.turn(len(decoding))
        every = LEAST_PROBE_RUNS
        if prices.measured(rows) >= SURE:
            every = min(PROBE_RUNS, max(every, int(prices.price(rows, rows) / PROBE_SHARE)))
        probe = is_probe(turn, every)
        if prices.wants_plain(rows, turn) or (rows == self._unpaid and not probe):
            return best
        chance = self._chances(decoding)
        tried, most_for_cost = best, 0.0
        cap = 1
        while cap < 2 * self._max_drafts:
            drafts = np.minimum(most, cap)
            price = MARGIN * prices.price(rows, int(drafts.sum()))
            if price > 0.0:
                next_one = min((1.0 - SHARED) * price, 1.0)
                paying = np.log(next_one) / np.log(chance)
                drafts = np.minimum(drafts, paying.astype(np.int32))
            count = int(drafts.sum())
            gain = float((chance * (1.0 - chance**drafts) / (1.0 - chance)).sum())
            cost = count * MARGIN * prices.price(rows, count)
            if gain - cost > best_net:
                best, best_net = drafts, gain - cost
            if gain > most_for_cost * cost:
                tried, most_for_cost = drafts, gain / max(cost, LEAST)
            cap *= 2
        self._unpaid = 0 if best_net > 0.0 else rows
        if probe or (best_net > 0.0 and turn % RETRY_STEPS == 0):
            return np.maximum(np.maximum(best, tried), np.minimum(most, 1))
        return best

    def _chances(self, rows: Intp) -> npt.NDArray[np.float64]:
        """That a draft of these rows stands."""
        stood = self._stood[rows] + OTHERS * (self._all_stood / self._all_tried)
        return np.clip(stood / (self._tried[rows] + OTHERS), 0.01, 0.99)

    def _extend(
        self,
        builder: StepPlanBuilder,
        request: Request,
        planned: int,
        drafts: int,
        *,
        spare: bool,
    ) -> int:
        """Blocks for drafts behind `planned` tokens, new ones while some are to `spare`; for how
        many drafts there are."""
        if not spare:
            return min(drafts, self._kv.held_tokens(request) - planned)
        newest = self._rows.least_planned(request.row) - 1  # it is part of this step already
        builder.add_updates(request, self._kv.trim(request, newest))
        room = self._kv.fit(request, start=planned, want=drafts, drafts=True)
        builder.add_updates(request, self._kv.extend(request, planned + room, drafts=True))
        return room

    def proposed_drafts(self, in_flight: InFlightStep, live: Bool) -> Sequence[Int32]:
        """See Speculation."""
        rows = in_flight.rows[live]
        if not len(in_flight.drafts):
            return [_NONE] * len(rows)
        proposed = self._proposed_at[rows] == self._rows.num_known_tokens[rows]
        most = np.where(proposed, in_flight.drafts[live], 0)
        drafts = [self._proposed[row, :num] for row, num in zip(rows, most.tolist(), strict=True)]
        return [tokens[tokens >= 0] for tokens in drafts]

    def give_up(self, in_flight: InFlightStep, void: Bool) -> None:
        """See Speculation."""
        if len(in_flight.drafts):
            drafts = in_flight.drafts[void]
            self._rows.settle_drafts(in_flight.rows[void], drafts, np.zeros_like(drafts))

    def positions(self, in_flight: InFlightStep) -> Int32:
        """See Speculation: behind all tokens that are known."""
        return self._rows.num_known_tokens[in_flight.rows]

    def settle(self, in_flight: InFlightStep, result: StepResult, live: Bool) -> None:
        """See Speculation."""
        live = live & in_flight.sample
        if len(result.proposed):
            self._keep_proposed(in_flight.rows[live], result, live)
        if self._prices is not None and not in_flight.prefills and len(in_flight.rows):
            drafts = int(in_flight.drafts.sum()) if len(in_flight.drafts) else 0
            self._prices.observe(len(in_flight.rows), drafts, in_flight.seconds)
        if not len(in_flight.drafts):
            return
        self._unpaid = 0
        rows = in_flight.rows[live]
        accepted = (result.tokens[live] >= 0).sum(axis=1, dtype=np.int32) - 1
        drafted = result.drafted[live] if len(result.drafted) else np.zeros_like(accepted)
        planned = in_flight.drafts[live]
        self._rows.settle_drafts(rows, planned, accepted)
        self._most[rows[self._loses[rows] & (planned > drafted) & (drafted == 0)]] = 0
        tried = accepted + (accepted < planned)
        self._stood[rows] = KEEP * self._stood[rows] + accepted
        self._tried[rows] = KEEP * self._tried[rows] + tried
        self._all_stood = KEEP_ALL * self._all_stood + float(accepted.sum())
        self._all_tried = KEEP_ALL * self._all_tried + float(tried.sum())
        self._stats.add(drafted, accepted)
        for place in np.flatnonzero(self._predicted[rows]).tolist():
            self._rows.owner(int(rows[place])).count_drafts(drafted[place], accepted[place])
        length = self._next[rows]
        grown = np.maximum(length, 2 * drafted + 1)
        lengths = np.where(accepted == drafted, grown, accepted + 1)
        lengths = np.where(accepted > 0, lengths, np.maximum(length // 2, 1))
        lengths = np.where(drafted > 0, lengths, length)
        self._next[rows] = np.minimum(lengths, self._most[rows])

    def _keep_proposed(self, rows: Int32, result: StepResult, live: Bool) -> None:
        """The drafts of the next step, behind the tokens that this one brings."""
        gained = (result.tokens[live] >= 0).sum(axis=1, dtype=np.int32)
        self._proposed[rows] = result.proposed[live, : self._max_drafts]
        self._proposed_at[rows] = self._rows.num_known_tokens[rows] + gained


def speculation_of(
    spec: SpeculationSpec | None,
    facts: WorkerFacts,
    kv: KVManager,
    rows: RowTable,
    hooks: AdmissionHooks,
) -> Speculation:
    """What the options say, as far as the workers can verify drafts; of a model that writes blocks,
    these."""
    if facts.block_length:
        return WholeBlocks(rows, facts)
    if spec is None or not facts.max_drafts:
        return NoSpeculation()

    def may_draft(request: EngineRequest) -> bool:
        sampling = request.sampling
        if sampling.capture_layers or sampling.logits_processors or sampling.remembers:
            return False
        if not request.hook_payloads:
            return True
        return spec.masked and hooks.follow_drafts(request)

    most = min(spec.num_tokens, facts.max_drafts)
    return DraftLengths(spec, kv, rows, max_drafts=most, may_draft=may_draft)
