"""Steps of a few fixed sizes, whose whole work is on the device: what can be recorded once and replayed.

A step costs the host one packed message, one copy and one launch; kernels build positions, slots and tables from the
message and from the rows' tables (kernels/step_inputs), and put the sampled tokens back into the rows and into a ring
that is copied to the host on a stream of its own (kernels/step_commit). All tensors a step reads or writes are made
once, for the largest bucket, and shared by all buckets: steps run one after another.

T query tokens and R rows of a bucket (padded), N rows sampled, G KV groups, M most rows, S ring slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, Batch, Tap
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_commit.op import OP as COMMIT
from headrace.back.kernels.step_inputs.op import (
    HEADER,
    ROWS,
    SLOT,
    StepInputsProblem,
    StepOut,
    StepTables,
)
from headrace.back.kernels.step_inputs.op import OP as INPUTS
from headrace.back.runner.batch import StepShape
from headrace.back.runner.requests import GrowingTable, Rows
from headrace.back.runner.steps import ExactSteps, Machine, Moment, Outputs, Ran
from headrace.back.sampling.sampler import Picks
from headrace.back.sampling.step_draw import MOST_WORDS, AskedRows, Drawing, StepTold
from headrace.back.sampling.tops import Leaves
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import StepPlan

RING = 8
"""Slots of messages and results; two steps are in flight at most, so a slot is long free when it is used again."""
MOST_FRAMES = 512
"""Views of the static tensors that are kept, by size."""
MIXED_ROWS = 16
"""The smallest number of rows of a bucket with prompts in it; the next are 4 and 16 times as many."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The size of a step. `decode`: every row has one query token, row i is token i, tokens == rows. `leaves`:
    what it leaves for the sampler, or does itself. `every`: it leaves the hidden states of all tokens, not only of each
    row's last."""

    tokens: int
    rows: int
    decode: bool
    updates: int
    leaves: Leaves = "logits"
    every: bool = False

    def __str__(self) -> str:
        size = f"{self.rows} rows" if self.decode else f"{self.tokens} tokens, {self.rows} rows"
        size += ", all hidden states" if self.every else ""
        return f"{size}, {self.leaves}" if isinstance(self.leaves, Drawing) else size


class Sizes(Protocol):
    """Which bucket a step takes."""

    @property
    def largest(self) -> Bucket:
        """The bucket for which memory must be there."""
        ...

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    def of(self, *, tokens: int, rows: int) -> Bucket:
        """A bucket that holds a step."""
        ...


class MakeSizes(Protocol):
    """Makes the sizes of a runner's steps."""

    def __call__(self, *, max_rows: int, max_tokens: int, groups: int) -> Sizes: ...


class Buckets:
    """The sizes there are: decodes of 1, 2, 4 rows, by 8 up to 64, then four for each power of two; mixed steps whose
    padding is at most an eighth, from 1024 tokens on a sixteenth.

    Sizes of decodes are few, so that all are recorded at start: one that is met later costs two steps launched kernel
    by kernel (H200, 8B, 512 requests to their end: 43 sizes recorded on the way took 1.6 of 26 s). Padding rows read no
    KV, only the products grow."""

    def __init__(self, *, max_rows: int, max_tokens: int, groups: int) -> None:
        self._groups = groups
        self._decodes = _decode_sizes(max_rows)
        self._tokens = _token_sizes(max_tokens)
        rows = (MIXED_ROWS * 4**i for i in range(8))
        self._rows = [*(r for r in rows if r < max_rows), max_rows]

    def of(self, *, tokens: int, rows: int) -> Bucket:
        """The smallest bucket that holds a step."""
        if tokens == rows:
            return self.decode(self._decodes[bisect_left(self._decodes, rows)])
        size = self._tokens[bisect_left(self._tokens, tokens)]
        most = self._rows[bisect_left(self._rows, rows)]
        updates = self._groups * (size // 8 + 2 * most)
        return Bucket(tokens=size, rows=most, decode=False, updates=updates)

    def decode(self, rows: int) -> Bucket:
        """The bucket of that many decodes."""
        return Bucket(tokens=rows, rows=rows, decode=True, updates=2 * self._groups * rows)

    @property
    def largest(self) -> Bucket:
        """The bucket for which memory must be there."""
        tokens, rows = self._tokens[-1], self._rows[-1]
        updates = self._groups * (tokens // 8 + 2 * rows)
        return Bucket(tokens=tokens, rows=rows, decode=False, updates=updates)

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps: all sizes of decodes."""
        return tuple(reversed(self._decodes))

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps: powers of two, which kernels pad numbers of tokens to, half as many again, and the largest."""
        largest = self._decodes[-1]
        few = {*(1 << i for i in range(16)), *(3 << i for i in range(16))}
        return tuple(rows for rows in self.common_rows if rows == largest or rows in few)


def _decode_sizes(most: int) -> list[int]:
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16)]
    while sizes[-1] < most:
        sizes += [(1 << (sizes[-1].bit_length())) * quarter // 4 for quarter in range(4, 8)]
    return [*(size for size in sizes if size < most), most]


def _token_sizes(most: int) -> list[int]:
    sizes, size = [], 16
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(16, octave // (16 if octave >= 1024 else 8))
    return [*sizes, most]


class Replay(Protocol):
    """Runs the step of a bucket, by calling it or by replaying what it once did; and knows the device's streams."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What is recorded, for the table of decisions."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        ...

    def follow(self) -> None:
        """Whatever runs from now on comes behind what the current stream has been given so far."""
        ...

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Steps."""
        ...

    def run(self, bucket: Bucket, step: Callable[[Bucket], Outputs]) -> Outputs:
        """Runs the bucket's step on the message that was copied last."""
        ...

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the host behind what was launched, beside what is launched later."""
        ...

    def moment(self) -> Moment:
        """The point behind everything that was launched and read."""
        ...


class BucketSteps:
    """`Steps` by buckets. See the top of the file; the state must be `in_graphs`."""

    def __init__(
        self,
        machine: Machine,
        replay: Replay,
        *,
        sizes: MakeSizes = Buckets,
        num_groups: int,
        block_tokens: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        device = machine.device
        self._machine, self._replay, self._kv = machine, replay, machine.kv
        shortcuts = {"picks": machine.model.pick, "tops": machine.model.tops}
        self._shortcuts = {leaves: way for leaves, way in shortcuts.items() if way is not None}
        self._lacks = shortcuts.keys() - self._shortcuts.keys()
        self.buckets = sizes(max_rows=max_rows, max_tokens=max_tokens, groups=num_groups)
        problem = StepInputsProblem(
            device=device.type, block_tokens=block_tokens, max_rows=max_rows
        )
        self._problem = problem
        inputs, commit = INPUTS.choose(problem), COMMIT.choose(problem)
        self._inputs, self._commit = inputs.bind(), commit.bind()
        self._chosen = decisions((inputs, commit))
        self.common_rows = self.buckets.common_rows
        self.distinct_rows = self.buckets.distinct_rows
        columns = -(-max_model_len // block_tokens)
        self._tables = StepTables(
            tokens_MC=_zeros((max_rows + 1, max_model_len + 1), device),
            blocks_GMB=_zeros((num_groups, max_rows + 1, columns), device),
        )
        tables = tuple(GrowingTable(blocks_MB) for blocks_MB in self._tables.blocks_GMB)
        tokens = GrowingTable(self._tables.tokens_MC)
        self.rows = Rows(tokens, tables, block_tokens=block_tokens)
        self._exact = ExactSteps(machine, self.rows)
        self._message = _Message(problem, self._tables, self.buckets.largest.updates)
        self._picked = _Ring((2, max_rows), device)
        self._drawn = _Ring((max_rows * MOST_WORDS,), device)
        self._static = _Static(max_tokens, self._tables)
        self._frames: dict[Bucket, _Frame] = {}
        replay.follow()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Steps."""
        return (*self._chosen, *self._replay.decisions)

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        return self._replay.scope()

    def use_kv(self, kv: tuple[torch.Tensor, ...]) -> None:
        """See Steps."""
        self._kv = kv
        self._exact.use_kv(kv)
        self._frames.clear()
        self._replay.follow()

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Steps."""
        return self._replay.compiling()

    def run(self, plan: StepPlan, shape: StepShape, *, tap: Tap | None = None) -> Ran:
        """See Steps. One that is looked into is run by itself, over the same rows and cache."""
        if tap is not None:
            return self._exact.run(plan, shape, tap=tap)
        self.rows.start(plan.starts)
        if plan.feeds:
            self.rows.feed(plan.feeds)
        bucket = self.buckets.of(tokens=int(shape.query_start[-1]), rows=shape.rows.size)
        if (bucket.decode or shape.needs == Drawing()) and shape.needs not in self._lacks:
            bucket = replace(bucket, leaves=shape.needs)
        if shape.every and not bucket.decode:
            bucket = replace(bucket, every=True)
        slot = self._message.send(bucket, plan, shape, self.rows)
        out = self._replay.run(bucket, self._step)
        words = bucket.leaves.words if isinstance(bucket.leaves, Drawing) else 0
        ring = self._drawn if words else self._picked
        self._replay.read(ring.host[slot], ring.slots[slot])
        drawn = shape.needs == "picks" or isinstance(bucket.leaves, Drawing)
        told = ring.told(slot, words) if drawn else None
        return Ran(out=out, index=shape.sampled, told=told)

    def moment(self) -> Moment:
        """See Steps."""
        return self._replay.moment()

    def _step(self, bucket: Bucket) -> Outputs:
        """The whole step on the device, from the message that was copied last to the ring."""
        if bucket not in self._frames:
            if len(self._frames) >= MOST_FRAMES:
                self._frames.clear()
            self._frames[bucket] = self._frame(bucket)
        frame, model, words = self._frames[bucket], self._machine.model, self._message.words
        self._inputs(words, self._tables, frame.out)
        if frame.ones_R1 is not None:  # padding rows have no query
            torch.minimum(self._static.place[: bucket.rows + 1], words[ROWS], out=frame.ones_R1)
        hidden_TE = model.forward(frame.batch)
        if bucket.leaves == "tops":  # whose tokens the sampler puts into the rows
            return Outputs(hidden_TE=hidden_TE, tops=self._shortcuts["tops"](hidden_TE))
        if bucket.leaves == "picks":
            logits_RV, picks = None, self._shortcuts["picks"](hidden_TE)
        else:
            wanted = hidden_TE.index_select(0, frame.out.last_R) if bucket.every else hidden_TE
            logits_RV = model.logits(wanted)
            picks = self._machine.greedy(logits_RV)
        token_R = picks[0]
        if isinstance(bucket.leaves, Drawing):
            assert logits_RV is not None
            token_R = self._draw(bucket, bucket.leaves, logits_RV, picks)
        self._commit(words, token_R, picks[1], self._tables.tokens_MC, self._picked.data)
        return Outputs(hidden_TE=hidden_TE, logits_RV=logits_RV, picks=picks)

    def _draw(
        self, bucket: Bucket, drawing: Drawing, logits_RV: torch.Tensor, picks: Picks
    ) -> torch.Tensor:
        """The tokens of rows that ask for more than picks; what is told of them goes into the ring."""
        assert self._machine.draw is not None
        row_R, position_R, sample_R = (self._message.section(i, bucket.rows) for i in (0, 1, 3))
        asked = AskedRows(row_R=row_R, position_R=position_R, sample_R=sample_R)
        slot = self._message.words[SLOT : SLOT + 1].long()
        token_R, told_RW = self._machine.draw(drawing, logits_RV, picks, asked)
        if told_RW is not None:
            self._drawn.data[:, : told_RW.numel()].index_copy_(0, slot, told_RW.view(1, -1))
        return token_R

    def _frame(self, bucket: Bucket) -> _Frame:
        out = self._static.out(bucket)
        starts_R1 = self._message.section(2, bucket.rows + 1)
        batch = Batch(
            token_ids_T=out.token_ids_T,
            positions_T=out.positions_T,
            plans=self._plans(bucket, out, starts_R1, 1 if bucket.decode else bucket.tokens),
            group_of_layer=self._machine.group_of_layer,
            kv=self._kv,
            logits_at_N=out.last_R,
        )
        if bucket.decode or bucket.every:
            return _Frame(out=out, batch=batch)
        ones_R1 = self._static.ones[: bucket.rows + 1]
        rest = replace(batch, plans=self._plans(bucket, out, ones_R1, 1))
        return _Frame(out=out, batch=replace(batch, rest=rest), ones_R1=ones_R1)

    def _plans(
        self, bucket: Bucket, out: StepOut, starts_R1: torch.Tensor, most: int
    ) -> tuple[AttentionPlan, ...]:
        """The plan of each group for rows of at most so many queries."""
        return tuple(
            AttentionPlan(
                query_start_R1=starts_R1,
                kv_len_R=self._message.section(1, bucket.rows),
                block_table_RB=table_RB,
                slot_T=slot_T,
                host_query_start=None,
                host_kv_len=None,
                num_decodes=bucket.rows if most == 1 else 0,
                max_query_len=most,
                max_kv_len=table_RB.shape[1] * self._problem.block_tokens,
            )
            for slot_T, table_RB in zip(out.slots_GT, out.tables_GRB, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """A bucket's views of the static tensors. ones_R1: where queries start if each row has one, for batches with a
    rest."""

    out: StepOut
    batch: Batch
    ones_R1: torch.Tensor | None = None


class _Static:
    """The tensors that are built anew each step, for the largest bucket; smaller ones take their beginnings."""

    def __init__(self, max_tokens: int, tables: StepTables) -> None:
        groups, rows, columns = tables.blocks_GMB.shape
        new = {"dtype": torch.int64, "device": tables.blocks_GMB.device}
        self._token_ids, self._positions = (torch.zeros(max_tokens, **new) for _ in range(2))
        self._slots = torch.zeros(groups * max_tokens, **new)
        self._last = torch.zeros(rows, **new)
        self._tables = _zeros(tables.blocks_GMB.shape, tables.blocks_GMB.device).view(-1)
        self.ones, self.place = (
            torch.arange(rows + 1, dtype=torch.int32, device=new["device"]) for _ in range(2)
        )
        self._shape = groups, columns

    def out(self, bucket: Bucket) -> StepOut:
        """The bucket's part."""
        groups, columns = self._shape
        tables = self._tables[: groups * bucket.rows * columns]
        return StepOut(
            token_ids_T=self._token_ids[: bucket.tokens],
            positions_T=self._positions[: bucket.tokens],
            slots_GT=self._slots[: groups * bucket.tokens].view(groups, bucket.tokens),
            tables_GRB=tables.view(groups, bucket.rows, columns),
            last_R=self._last[: bucket.rows],
            updates=bucket.updates,
        )


class _Ring:
    """RING slots of what steps tell: `data` on the device, cut into `slots`; `host`, their copies; `told`: slot and W
    -> what is read there. Cut once: each small operation of torch costs microseconds, and some give up the
    interpreter's lock."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.data = torch.zeros((RING, *shape), dtype=torch.int32, device=device)
        self.slots = self.data.unbind()
        host = device.type == "cpu"  # which reads the ring itself
        self.host = self.slots if host else _host_buffer((RING, *shape), device).unbind()
        arrays = [slot.numpy() for slot in self.host]
        self.told = cache(lambda slot, words: StepTold.of(arrays[slot], words))


class _Message:
    """The packed message (its layout: kernels/step_inputs/op.py), `words` on the device and RING slots on the host."""

    def __init__(self, problem: StepInputsProblem, tables: StepTables, updates: int) -> None:
        device = tables.blocks_GMB.device
        self._problem = problem
        self._shape = tables.blocks_GMB.shape
        self.words = torch.zeros(problem.updates_at + 2 * updates, dtype=torch.int32, device=device)
        self._slots: torch.Tensor | None = None
        if device.type == "cpu":
            # The step has run when the next message is written: it is written where the step reads it. Besides, each
            # small operation of torch gives up the interpreter's lock and may wait long to get it back.
            self._host = [self.words.numpy()] * RING
        else:
            self._slots = _host_buffer((RING, self.words.numel()), device)
            self._host = list(self._slots.numpy())
        self._slot = 0

    def section(self, index: int, count: int) -> torch.Tensor:
        """The first words of a section on the device."""
        return self.words[HEADER + index * self._problem.section :][:count]

    def send(self, bucket: Bucket, plan: StepPlan, shape: StepShape, rows: Rows) -> int:
        """Packs the step and starts its copy; returns the slot of this step. Updates beyond what the bucket holds go
        by `rows` before it."""
        self._slot = slot = (self._slot + 1) % RING
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
        if self._slots is not None:
            self.words[:end].copy_(self._slots[slot, :end], non_blocking=True)
        return slot


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros int32. On a CPU by calloc: pages nobody has written cost no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    return torch.from_numpy(np.zeros(shape, np.int32))


def _host_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
