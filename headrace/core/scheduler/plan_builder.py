"""Builds the plan of one step from rows and block updates, and the core's record of that step; and
who is asked for the drafts of its rows (`Speculation`).

A preemption may take a row that the builder already holds; each entry therefore remembers the
row's epoch, and entries of rows that have another owner since are left out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.wire.step import RowFeed, RowStart, StepPlan, StepResult
from headrace.core.kv.manager import BlockColumns
from headrace.core.request import Request, RowTable

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Intp = npt.NDArray[np.intp]

_NONE = np.zeros(0, np.int32)
_NO_ROWS = np.zeros(0, np.intp)


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightStep:
    """What the core must know of a submitted step to read its result; index i is plan.rows[i].

    `position`: tokens with KV after the step, for rows with drafts in flight an upper bound;
    `drafts`: see StepPlan; `submitted_at` is set when it goes to the executor, `seconds`, what it
    took, when its result is in. `deferred` names the hooks whose payload the workers still wait
    for.
    """

    step: int
    rows: Int32
    epochs: Int32
    position: Int32
    sample: Bool
    num_decodes: int
    num_prefill_tokens: int
    prefills: list[tuple[int, Request]]
    drafts: Int32
    submitted_at: float = 0.0
    seconds: float = 0.0
    deferred: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of all its rows."""
        return self.num_decodes + self.num_prefill_tokens


@dataclass(slots=True, eq=False)
class StepPlanBuilder:
    """Collects one step."""

    _rows: RowTable
    _decodes: Intp = field(default_factory=lambda: _NO_ROWS)
    _decode_epochs: Int32 = field(default_factory=lambda: _NONE)
    _computed: Int32 = field(default_factory=lambda: _NONE)
    _drafts: Int32 = field(default_factory=lambda: _NONE)
    _decode_blocks: list[BlockColumns] = field(default_factory=list)
    # group, row, index, id, epoch
    _updates: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    # request, row, start, tokens, sample
    _prefills: list[tuple[Request, int, int, int, bool]] = field(default_factory=list)
    _starts: list[tuple[RowStart, Request]] = field(default_factory=list)
    _feeds: list[tuple[RowFeed, Request]] = field(default_factory=list)
    preempted: set[int] = field(default_factory=set)
    followed: bool = True

    @property
    def num_rows(self) -> int:
        """Rows that will run."""
        self._drop_preempted()
        return len(self._decodes) + len(self._prefills)

    def add_decodes(self, rows: Intp, planned: Int32) -> None:
        """These rows compute their newest token, at position `planned`, and sample the next."""
        self._decodes, self._computed = rows, planned
        self._decode_epochs = self._rows.epoch[rows]
        self._rows.num_planned_tokens[rows] = planned + 1
        self._rows.length[rows] = planned + 2

    @property
    def decodes(self) -> Intp:
        """The rows that decode, with drafts if all of the step's do: none beside prompts."""
        self._drop_preempted()
        return self._decodes if not self._prefills else _NO_ROWS

    def add_drafts(self, drafts: Int32) -> None:
        """Each row of `decodes` verifies so many drafts behind its newest token."""
        rows = self._decodes
        self._drafts = drafts
        self._rows.num_planned_tokens[rows] += drafts
        self._rows.length[rows] += drafts
        self._rows.num_unverified[rows] += drafts

    def add_decode_blocks(self, columns: list[BlockColumns]) -> None:
        """Decoding rows have got these blocks: see KVManager.extend_each."""
        self._decode_blocks = columns

    def add_updates(self, request: Request, updates: Sequence[tuple[int, int, int]]) -> None:
        """Changes to the block tables of the request's row: (group, index, id)."""
        if updates:
            row = request.row
            epoch = int(self._rows.epoch[row])
            self._updates.extend(
                (group, row, index, block, epoch) for group, index, block in updates
            )

    def add_start(self, start: RowStart, request: Request) -> None:
        """A request takes a row."""
        self._starts.append((start, request))

    def add_feed(self, feed: RowFeed, request: Request) -> None:
        """Tokens of a running row that the runner has not sampled."""
        self._feeds.append((feed, request))

    def add_prefill(self, request: Request, *, start: int, tokens: int, sample: bool) -> None:
        """A chunk of a prompt."""
        self._prefills.append((request, request.row, start, tokens, sample))

    def _drop_preempted(self) -> None:
        """Leaves out what was preempted after it had been added."""
        if not self.preempted:
            return
        epoch = self._rows.epoch
        self._prefills = [entry for entry in self._prefills if entry[0].row == entry[1]]
        self._updates = [entry for entry in self._updates if epoch[entry[1]] == entry[4]]
        keep = epoch[self._decodes] == self._decode_epochs
        self._drop_blocks(self._decodes[~keep])
        self._decodes, self._decode_epochs = self._decodes[keep], self._decode_epochs[keep]
        self._computed = self._computed[keep]

    def _drop_blocks(self, gone: Intp) -> None:
        kept: list[BlockColumns] = []
        for group, rows, index, ids in self._decode_blocks:
            keep = ~np.isin(rows, gone)
            kept.append((group, rows[keep], index[keep], ids[keep]))
        self._decode_blocks = kept

    def finish(self, step: int, ends: list[int]) -> tuple[StepPlan, InFlightStep]:
        """The plan and its record while it is in flight. Rows with one token come first."""
        self._drop_preempted()
        self._prefills.sort(key=lambda entry: entry[3] != 1)
        if len(self._drafts):
            self._sort_by_drafts()
        rows, num_tokens, num_computed, sample = self._columns()
        num_decodes = len(self._decodes)
        group, row, index, block = self._block_columns()
        plan = StepPlan(
            step=step,
            ends=np.asarray(ends, np.int32) if ends else _NONE,
            starts=[start for start, request in self._starts if request.row == start.row],
            feeds=[feed for feed, request in self._feeds if request.row == feed.row],
            block_group=group,
            block_row=row,
            block_index=index,
            block_id=block,
            rows=rows,
            num_tokens=num_tokens,
            num_computed=num_computed,
            sample=sample,
            drafts=self._drafts,
            followed=self.followed,
        )
        in_flight = InFlightStep(
            step=step,
            rows=rows,
            epochs=self._rows.epoch[rows],
            position=num_computed + num_tokens,
            sample=sample,
            num_decodes=num_decodes,
            num_prefill_tokens=sum(entry[3] for entry in self._prefills),
            prefills=[(num_decodes + i, entry[0]) for i, entry in enumerate(self._prefills)],
            drafts=self._drafts,
        )
        return plan, in_flight

    def _sort_by_drafts(self) -> None:
        """Rows without drafts, of one token each, come first."""
        order = np.argsort(self._drafts > 0, kind="stable")
        self._drafts = self._drafts[order]
        self._decodes = self._decodes[order]
        self._computed = self._computed[order]

    def _columns(self) -> tuple[Int32, Int32, Int32, Bool]:
        rows, computed = self._decodes.astype(np.int32), self._computed
        tokens = 1 + self._drafts if len(self._drafts) else np.ones(len(rows), np.int32)
        sample = np.ones(len(rows), np.bool_)
        if not self._prefills:
            return rows, tokens, computed, sample
        more = np.asarray([entry[1:] for entry in self._prefills], np.int32)
        return (
            np.concatenate([rows, more[:, 0]]),
            np.concatenate([tokens, more[:, 2]]),
            np.concatenate([computed, more[:, 1]]),
            np.concatenate([sample, more[:, 3] != 0]),
        )

    def _block_columns(self) -> tuple[Int32, Int32, Int32, Int32]:
        columns: list[tuple[Int32, Int32, Int32, Int32]] = []
        for group, crossing, index, ids in self._decode_blocks:
            if len(crossing):
                row = crossing.astype(np.int32)
                columns.append((np.full(len(row), group, np.int32), row, index, ids))
        if self._updates:
            table = np.asarray(self._updates, np.int64).astype(np.int32)
            columns.append((table[:, 0], table[:, 1], table[:, 2], table[:, 3]))
        if len(columns) < 2:
            return columns[0] if columns else (_NONE, _NONE, _NONE, _NONE)
        rows, updates, index, block = (np.concatenate(p) for p in zip(*columns, strict=True))
        return rows, updates, index, block


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
        self.per_position += (accepted[:, None] > np.arange(len(self.per_position))).sum(axis=0)


class Speculation(Protocol):
    """Decides on drafts, and learns what became of them."""

    @property
    def stats(self) -> DraftStats:
        """What was drafted so far."""
        ...

    def watch(self, waiting: Sized) -> None:
        """The requests that wait."""
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

    def proposed_drafts(self, in_flight: InFlightStep, live: Bool) -> Sequence[Int32]:
        """Of each of these rows of the oldest step in flight, the drafts that it verifies at most,
        as far as the workers have told them."""
        ...

    def give_up(self, in_flight: InFlightStep, void: Bool) -> None:
        """What the step brings of these rows does not count: nothing is promised of them."""
        ...

    def positions(self, in_flight: InFlightStep) -> Int32:
        """The position of the first token that each row of a step has sampled; every step before it
        is in."""
        ...

    def settle(self, in_flight: InFlightStep, result: StepResult, live: Bool) -> None:
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

    def watch(self, waiting: Sized) -> None:
        """Whoever waits."""

    def start(self, row: int, request: Request) -> None:
        """Nothing to remember."""

    def lacking_blocks(self, crossing: Intp) -> Intp:
        """All of them: blocks are taken one by one."""
        return crossing

    def add_drafts(self, builder: StepPlanBuilder) -> None:
        """None."""

    def proposed_drafts(self, in_flight: InFlightStep, live: Bool) -> Sequence[Int32]:
        """None."""
        return [_NONE] * int(live.sum())

    def give_up(self, in_flight: InFlightStep, void: Bool) -> None:
        """Nothing was promised."""

    def positions(self, in_flight: InFlightStep) -> Int32:
        """Those that were planned."""
        return in_flight.position

    def settle(self, in_flight: InFlightStep, result: StepResult, live: Bool) -> None:
        """Nothing was promised."""
