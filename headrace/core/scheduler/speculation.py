"""How many drafts each decoding row verifies in a step, behind an object that the scheduler asks.

A step is planned as if nothing were drafted; then, if all its rows decode, each gets as many drafts
as its own take pays for. So the token budget schedules what it schedules without speculation, and
the forward pass has a capacity of its own. Drafts never cost anybody a row: a block is taken for
them only while each decoding row could still have its next one, and they end at the request's
length limit.

A row's tokens must not depend on who drafts: every draft is sampled as its place would be without
(back/kernels/step_verify). What cannot be sampled ahead drafts nothing: rows with a grammar, whose
masks follow the tokens one by one, with penalties, which count them, and rows whose layers are
captured.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.step import StepResult, WorkerFacts
from headrace.core.kv.manager import KVManager
from headrace.core.request import Request, RowTable
from headrace.core.scheduler.plan_builder import InFlightStep, StepPlanBuilder

Int32 = npt.NDArray[np.int32]
Intp = npt.NDArray[np.intp]


class DraftStats:
    """Totals since start. A draft is what was proposed for a row in a step, of some tokens;
    `per_position[i]`: how often its i-th token stood."""

    def __init__(self, max_drafts: int) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.per_position = np.zeros(max_drafts, np.int64)

    def add(self, drafted: Int32, accepted: Int32) -> None:
        """A step's rows that had drafts proposed."""
        self.num_drafts += int(np.count_nonzero(drafted))
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        places = np.arange(len(self.per_position))
        self.per_position += (accepted[:, None] > places).sum(axis=0)


class Speculation(Protocol):
    """Decides on drafts, and learns what became of them."""

    @property
    def stats(self) -> DraftStats:
        """What was drafted so far."""
        ...

    def start(self, row: int, request: Request) -> None:
        """A request takes a row."""
        ...

    def lacking_blocks(self, crossing: Intp) -> Intp:
        """Of rows whose next token begins a block, those that do not have that block yet."""
        ...

    def add_drafts(self, builder: StepPlanBuilder) -> None:
        """Gives the rows of a step their drafts, last of all."""
        ...

    def positions(self, in_flight: InFlightStep) -> Int32:
        """The position of the first token that each row of a step has sampled; every step before it
        is in."""
        ...

    def settle(
        self, in_flight: InFlightStep, result: StepResult, live: npt.NDArray[np.bool_]
    ) -> None:
        """A result is in: what was promised beyond it is taken back from rows still `live`."""
        ...


class NoSpeculation:
    """Nothing is drafted."""

    def __init__(self) -> None:
        self._stats = DraftStats(0)

    @property
    def stats(self) -> DraftStats:
        """See Speculation."""
        return self._stats

    def start(self, row: int, request: Request) -> None:
        """Nothing to remember."""

    def lacking_blocks(self, crossing: Intp) -> Intp:
        """All of them: blocks are taken one by one."""
        return crossing

    def add_drafts(self, builder: StepPlanBuilder) -> None:
        """None."""

    def positions(self, in_flight: InFlightStep) -> Int32:
        """Those that were planned."""
        return in_flight.position

    def settle(
        self, in_flight: InFlightStep, result: StepResult, live: npt.NDArray[np.bool_]
    ) -> None:
        """Nothing was promised."""


class DraftLengths:
    """Drafts by what a row's last ones were worth: twice as many, and one, after all stood; as many
    as stood, and one, after some did; half as many, at least one, after none did.

    `max_drafts`: of a row in a step, as many as both the options and the workers allow.
    """

    def __init__(
        self, spec: SpeculationSpec, kv: KVManager, rows: RowTable, *, max_drafts: int
    ) -> None:
        self._max_rows = spec.max_rows
        self._kv = kv
        self._rows = rows
        self._most = np.zeros(rows.num_rows, np.int32)
        self._next = np.zeros(rows.num_rows, np.int32)
        self._max_drafts = max_drafts
        self._stats = DraftStats(max_drafts)

    @property
    def stats(self) -> DraftStats:
        """See Speculation."""
        return self._stats

    def start(self, row: int, request: Request) -> None:
        """See Speculation."""
        self._most[row] = self._next[row] = self._max_drafts if may_draft(request) else 0

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
        decoding = builder.decodes
        if not 0 < len(decoding) <= self._max_rows:
            return
        rows = self._rows
        drafts = np.minimum(self._next[decoding], rows.limit[decoding] - rows.length[decoding])
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
        room = self._kv.fit(request, start=planned, want=drafts)
        builder.add_updates(request, self._kv.extend(request, planned + room))
        return room

    def positions(self, in_flight: InFlightStep) -> Int32:
        """See Speculation: behind all tokens that are known."""
        return self._rows.num_known_tokens[in_flight.rows]

    def settle(
        self, in_flight: InFlightStep, result: StepResult, live: npt.NDArray[np.bool_]
    ) -> None:
        """See Speculation."""
        if not len(in_flight.drafts):
            return
        rows = in_flight.rows[live]
        accepted = (result.tokens[live] >= 0).sum(axis=1, dtype=np.int32) - 1
        drafted = result.drafted[live] if len(result.drafted) else np.zeros_like(accepted)
        self._rows.settle_drafts(rows, in_flight.drafts[live], accepted)
        self._stats.add(drafted, accepted)
        length = self._next[rows]
        grown = np.maximum(length, 2 * drafted + 1)
        lengths = np.where(accepted == drafted, grown, accepted + 1)
        lengths = np.where(accepted > 0, lengths, np.maximum(length // 2, 1))
        lengths = np.where(drafted > 0, lengths, length)
        self._next[rows] = np.minimum(lengths, self._most[rows])


def speculation_of(
    spec: SpeculationSpec | None, facts: WorkerFacts, kv: KVManager, rows: RowTable
) -> Speculation:
    """What the options say, as far as the workers can verify drafts."""
    if spec is None or not facts.max_drafts:
        return NoSpeculation()
    return DraftLengths(spec, kv, rows, max_drafts=min(spec.num_tokens, facts.max_drafts))


def may_draft(request: Request) -> bool:
    """Whether each of the row's tokens can be sampled before it is known that it comes."""
    sampling = request.wire.sampling
    penalties = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    counts = penalties != (1.0, 0.0, 0.0)
    return not counts and not request.wire.hook_payloads and not sampling.capture_layers
