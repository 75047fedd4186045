"""The permanent rows, and what one step makes of them.

`Rows` is what the runner knows of each request between steps: token ids and block tables on the
device, because sampled tokens are written there and feed the next step there; lengths come with
every plan and need no copy of their own. `StepShape` is built anew each step from a plan and the
rows, without a Python loop over rows, and so is what the device is told of it: a `StepMessage`, or
the batch of an exact step (exact_steps.py). Nothing is both.

T query tokens, R rows of a step, N rows that are sampled, B blocks of the longest row, U block
updates. Host cost at 32 decode rows: under 100 us (tests/back/runner/test_batch.py counts the
operations; benchmarks measure the time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from headrace.back.kernels.step_inputs.op import (
    HEADER,
    GroupBlocks,
    StepInputsProblem,
    StepTables,
)
from headrace.back.kernels.upload import host_buffer, to_device
from headrace.back.runner.sizes import Bucket
from headrace.back.sampling.in_step import HeadOutput, SamplerInput
from headrace.base.wire.step import RowFeed, RowStart, StepPlan

LEAD_TOKENS = 64
"""Of a prompt's end before what is predicted: the most that a lookup compares."""


class GrowingTable:
    """An int32 table [rows, columns] on the device, zero at first, whose columns double when they
    run out.

    Memory follows the longest request seen, not the longest that is allowed.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def reserve(self, columns: int) -> None:
        """Makes sure of at least `columns` columns; what is stored stays."""
        rows, have = self.data.shape
        if columns <= have:
            return
        wider = torch.zeros(
            (rows, max(columns, 2 * have)), dtype=torch.int32, device=self.data.device
        )
        wider[:, :have] = self.data
        self.data = wider

    @staticmethod
    def zeros(*, rows: int, columns: int, device: torch.device) -> GrowingTable:
        """An empty table."""
        return GrowingTable(torch.zeros((rows, columns), dtype=torch.int32, device=device))

    def at(self, row_K: np.ndarray, column_K: np.ndarray) -> torch.Tensor:
        """Where the entries (row_K[i], column_K[i]) lie in the flattened table, int64 [K] on the
        device."""
        # not a product with np.int64: NumPy 1 keeps the array's int32
        first_K = row_K.astype(np.int64) * self.data.shape[1]
        return to_device(first_K + column_K, self.data.device)

    def take(self, row_K: np.ndarray, column_K: np.ndarray) -> torch.Tensor:
        """The entries (row_K[i], column_K[i]), int32 [K]."""
        return self.data.view(-1).index_select(0, self.at(row_K, column_K))

    def put(self, row_K: np.ndarray, column_K: np.ndarray, value_K: torch.Tensor) -> None:
        """Sets entries; value int32 [K] on the device."""
        self.data.view(-1).index_copy_(0, self.at(row_K, column_K), value_K)


class Rows:
    """Tokens, block tables and prompt lengths of all rows.

    tokens [max_rows, columns]: column p is the token at position p.
    tables: one per KV group; [max_rows, columns]: column i is the block from token i * S on, S the
    tokens of the group's blocks
    num_prompt int32 [max_rows] on the host.
    step_tables: those of the steps' kernels, whose lengths and predictions are kept here too.
    groups: the blocks of each; empty: all grow with the row and are of `block_tokens`. cross_tokens
    int32 [max_rows] on the host: outputs of an encoder that each row has, where there are cross
    caches; the steps' tables have them too.
    """

    def __init__(
        self,
        tokens: GrowingTable,
        tables: tuple[GrowingTable, ...],
        *,
        block_tokens: int,
        step_tables: StepTables | None = None,
        groups: tuple[GroupBlocks, ...] = (),
    ) -> None:
        self.device = tokens.data.device
        self.block_tokens = block_tokens
        self.tokens = tokens
        self.tables = tables
        self._length_M = None if step_tables is None else step_tables.length_M
        self._predicted_M = None if step_tables is None else step_tables.predicted_M
        self._cross_M = None if step_tables is None else step_tables.cross_M
        self.groups = groups or (GroupBlocks(tokens=block_tokens),) * len(tables)
        self._crosses = any(group.span for group in self.groups)
        self.cross_tokens = np.zeros(tokens.data.shape[0], np.int32)
        self.num_prompt = np.zeros(tokens.data.shape[0], np.int32)

    @staticmethod
    def growing(
        *,
        max_rows: int,
        num_groups: int,
        block_tokens: int,
        device: torch.device,
        groups: tuple[GroupBlocks, ...] = (),
    ) -> Rows:
        """Empty rows whose tables grow."""
        new = {"rows": max_rows, "device": device}
        tables = (GrowingTable.zeros(**new, columns=256 // block_tokens) for _ in range(num_groups))
        tokens = GrowingTable.zeros(**new, columns=256)
        return Rows(tokens, tuple(tables), block_tokens=block_tokens, groups=groups)

    @staticmethod
    def over(tables: StepTables, groups: tuple[GroupBlocks, ...], *, block_tokens: int) -> Rows:
        """The rows whose tables these are."""
        return Rows(
            GrowingTable(tables.tokens_MC),
            tuple(GrowingTable(blocks_MB) for blocks_MB in tables.blocks_GMB),
            block_tokens=block_tokens,
            step_tables=tables,
            groups=groups,
        )

    def apply(self, plan: StepPlan) -> None:
        """Takes over the plan's starts and block updates."""
        self.begin(plan)
        if plan.block_id.size:
            self.update(plan)

    def begin(self, plan: StepPlan) -> None:
        """Takes over the plan's starts and feeds."""
        self.start(plan.starts)
        if plan.feeds:
            self.feed(plan.feeds)

    def start(self, starts: list[RowStart]) -> None:
        """Requests take rows: their tokens are stored and their block tables cleared."""
        if starts:
            rows = to_device(np.array([start.row for start in starts], np.int64), self.device)
            for table in self.tables:
                table.data.index_fill_(0, rows, 0)
            self._set_lengths(rows, [start.tokens.size for start in starts])
        for start in starts:
            self.tokens.reserve(start.tokens.size + 1)
            known = to_device(start.tokens, self.device)
            self.tokens.data[start.row, : start.tokens.size] = known
            self.num_prompt[start.row] = start.num_prompt
        if self._predicted_M is not None:
            for start in starts:
                self._predict(start, self._predicted_M)
        if starts and self._crosses:
            self._set_cross(starts)

    def _predict(self, start: RowStart, predicted_M: torch.Tensor) -> None:
        """Stores what the answer is expected to be behind the end of the prompt, by which its first
        token is found; as much as leaves the row half of the columns that it has not filled."""
        text = np.frombuffer(start.prediction, "<i4")
        if text.size:
            lead = start.tokens[max(0, start.num_prompt - LEAD_TOKENS) : start.num_prompt]
            room = (self.tokens.data.shape[1] - start.tokens.size) // 2
            text = np.concatenate((lead, text)).astype(np.int32)[:room]
        if text.size:
            columns = self.tokens.data.shape[1]
            self.tokens.data[start.row, columns - text.size :] = to_device(text, self.device)
        predicted_M[start.row] = text.size

    def _set_cross(self, starts: list[RowStart]) -> None:
        row_K = np.array([start.row for start in starts], np.int64)
        tokens_K = np.array([start.cross_tokens for start in starts], np.int32)
        self.cross_tokens[row_K] = tokens_K
        if self._cross_M is not None:
            at_K = to_device(row_K, self.device)
            self._cross_M.index_copy_(0, at_K, to_device(tokens_K, self.device))

    def append(self, row_K: np.ndarray, position_K: np.ndarray, token_K: torch.Tensor) -> None:
        """Each row's newest token, int32 [K] on the device, at its position."""
        self.tokens.put(row_K, position_K, token_K)
        if self._length_M is not None:
            self._set_lengths(to_device(row_K, self.device), position_K + 1)

    def _set_lengths(self, row_K: torch.Tensor, lengths: Sequence[int] | np.ndarray) -> None:
        if self._length_M is not None:
            length_K = to_device(np.asarray(lengths, np.int32), self.device)
            self._length_M.index_copy_(0, row_K, length_K)

    def feed(self, feeds: list[RowFeed]) -> None:
        """Tokens that were not sampled here are stored where they stand."""
        sizes = [feed.tokens.size for feed in feeds]
        row_K = np.repeat(np.array([feed.row for feed in feeds], np.int64), sizes)
        position_K = np.concatenate(
            [np.arange(feed.start, feed.start + feed.tokens.size) for feed in feeds]
        )
        self.tokens.reserve(int(position_K.max()) + 2)
        token_K = np.concatenate([feed.tokens for feed in feeds]).astype(np.int32, copy=False)
        self.tokens.put(row_K, position_K, to_device(token_K, self.device))
        if self._length_M is not None:
            fed = to_device(np.array([feed.row for feed in feeds], np.int64), self.device)
            self._set_lengths(fed, [feed.start + feed.tokens.size for feed in feeds])

    def update(self, plan: StepPlan, *, first: int = 0) -> None:
        """Takes over the plan's block updates, from the `first` on."""
        rows, indices, blocks = (
            part[first:] for part in (plan.block_row, plan.block_index, plan.block_id)
        )
        for group, table in enumerate(self.tables):
            if len(self.tables) == 1:
                row, index, block = rows, indices, blocks
            else:
                mine = plan.block_group[first:] == group
                row, index, block = rows[mine], indices[mine], blocks[mine]
            if not block.size:
                continue
            table.reserve(int(index.max()) + 1)
            table.put(row, index, to_device(block, self.device))


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The host's view of a step, all from the plan alone.

    rows [R] int64; query_start [R+1], kv_len [R] int32; row_T, position_T [T] int64;
    sampled [N] int64: indices into the plan's rows; sampled_row, sampled_position [N]: the row, and
    the position the sampled token will have; place [N]: where each is among what a bucket's step
    place: its row, or, if the step `verifies` drafts, its query token. needs: what the step leaves
    for the sampler; slots: of adapters and directions, or None; every: somebody wants all hidden
    states.
    """

    rows: np.ndarray
    query_start: np.ndarray
    kv_len: np.ndarray
    row_T: np.ndarray
    position_T: np.ndarray
    sampled: np.ndarray
    sampled_row: np.ndarray
    sampled_position: np.ndarray
    place: np.ndarray
    num_decodes: int
    max_query_len: int
    max_kv_len: int
    needs: SamplerInput = HeadOutput.LOGITS
    every: bool = False
    verifies: bool = False
    slots: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def prompt_pairs(self) -> int:
        """Query tokens of rows with several times the positions of their row, summed."""
        starts = self.query_start[self.num_decodes :].tolist()
        lengths = self.kv_len[self.num_decodes :].tolist()
        counts = (end - start for start, end in pairwise(starts))
        return sum(count * length for count, length in zip(counts, lengths, strict=True))


def shape_of(plan: StepPlan) -> StepShape:
    """Works out lengths, positions and the rows to sample.

    On the way from one step to the next: no reduction of numpy here, which gives up the
    interpreter's lock however few elements it has. The core's thread, woken by the last result,
    then takes it and keeps it for 300 us.
    """
    rows = plan.rows.astype(np.int64)
    query_start = np.zeros(rows.size + 1, np.int32)
    np.cumsum(plan.num_tokens, out=query_start[1:])
    kv_len = plan.num_computed + plan.num_tokens
    if plan.drafts.size:
        return _verifying(plan, rows, query_start, kv_len)
    num_decodes = int(np.count_nonzero(plan.num_tokens == 1))
    if num_decodes == rows.size:
        row_T, position_T = rows, plan.num_computed.astype(np.int64)
    else:
        assert (plan.num_tokens[:num_decodes] == 1).all(), "rows with one token come first"
        row_T = np.repeat(rows, plan.num_tokens)
        offset = np.repeat(plan.num_computed - query_start[:-1], plan.num_tokens)
        position_T = np.arange(query_start[-1], dtype=np.int64) + offset
    sampled = np.flatnonzero(plan.sample)
    return StepShape(
        rows=rows,
        query_start=query_start,
        kv_len=kv_len,
        row_T=row_T,
        position_T=position_T,
        sampled=sampled,
        sampled_row=rows[sampled],
        sampled_position=kv_len[sampled].astype(np.int64),
        place=sampled,
        num_decodes=num_decodes,
        max_query_len=max(plan.num_tokens.tolist()),
        max_kv_len=max(kv_len.tolist()),
    )


def _verifying(
    plan: StepPlan, rows: np.ndarray, query_start: np.ndarray, kv_len: np.ndarray
) -> StepShape:
    """A step with drafts: all rows decode, and each query token is sampled."""
    row_T = np.repeat(rows, plan.num_tokens)
    place = np.arange(query_start[-1], dtype=np.int64)
    position_T = place + np.repeat(plan.num_computed - query_start[:-1], plan.num_tokens)
    return StepShape(
        rows=rows,
        query_start=query_start,
        kv_len=kv_len,
        row_T=row_T,
        position_T=position_T,
        sampled=np.repeat(np.arange(rows.size), plan.num_tokens),
        sampled_row=row_T,
        sampled_position=position_T + 1,
        place=place,
        num_decodes=0,
        max_query_len=max(plan.num_tokens.tolist()),
        max_kv_len=max(kv_len.tolist()),
        verifies=True,
    )


class StepMessage:
    """The packed message (its layout: kernels/step_inputs/op.py), `words` on the device and RING
    slots on the host."""

    def __init__(
        self, problem: StepInputsProblem, tables: StepTables, updates: int, *, slots: int
    ) -> None:
        device = tables.blocks_GMB.device
        self._problem = problem
        self._shape = tables.blocks_GMB.shape
        self.words = torch.zeros(problem.updates_at + 2 * updates, dtype=torch.int32, device=device)
        self._slots: torch.Tensor | None = None
        if device.type == "cpu":
            # The step has run when the next message is written: it is written where the step reads
            # it. Besides, each small operation of torch gives up the interpreter's lock and may
            # wait long to get it back.
            self._host = [self.words.numpy()] * slots
        else:
            self._slots = host_buffer((slots, self.words.numel()), device)
            self._host = list(self._slots.numpy())
        self.slot, self._count = 0, slots

    def section(self, index: int, count: int) -> torch.Tensor:
        """The first words of a section on the device."""
        return self.words[HEADER + index * self._problem.section :][:count]

    def send_padding(self, bucket: Bucket) -> None:
        """A step without rows."""
        self.slot = slot = (self.slot + 1) % self._count
        words = self._host[slot]
        words[: self._problem.updates_at] = 0
        words[4] = slot
        words[HEADER : HEADER + bucket.rows] = self._problem.max_rows
        self._copy(self._problem.updates_at)

    def send(self, bucket: Bucket, plan: StepPlan, shape: StepShape, rows: Rows) -> int:
        """Packs the step and starts its copy; returns the slot of this step. Updates beyond what
        the bucket holds go by `rows` before it."""
        self.slot = slot = (self.slot + 1) % self._count
        words, size = self._host[slot], self._problem.section
        count, num_tokens = shape.rows.size, int(shape.query_start[-1])
        updates = min(plan.block_id.size, bucket.updates)
        words[:5] = count, num_tokens, shape.num_decodes, updates, slot
        columns = (
            (shape.rows, self._problem.max_rows, bucket.rows),
            (shape.kv_len, 0, bucket.rows),
            (shape.query_start, num_tokens, bucket.rows + 1),
            (plan.sample, 0, bucket.rows),
        )
        for i, (values, padding, width) in enumerate(columns):
            part = words[HEADER + i * size :][:width]
            part[: values.size], part[values.size :] = values, padding
        if plan.block_id.size > updates:
            rows.update(plan, first=updates)
        end = self._problem.updates_at + 2 * updates
        if updates:
            _, num_rows, width = self._shape
            at = (plan.block_group[:updates] * num_rows + plan.block_row[:updates]) * width
            pairs = words[self._problem.updates_at : end]
            pairs[0::2] = at + plan.block_index[:updates]
            pairs[1::2] = plan.block_id[:updates]
        self._copy(end)
        return slot

    def _copy(self, end: int) -> None:
        if self._slots is not None:
            self.words[:end].copy_(self._slots[self.slot, :end], non_blocking=True)
