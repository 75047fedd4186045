"""A runner in miniature for model tests: feeds given tokens through a model in chosen chunks over a
paged, poisoned cache.

Every KV group has its own block tables out of one pool. Blocks are dealt in random order; KV starts
as NaN, and a block that leaves a window is given back, nulled in the table and poisoned again, so
that reading one position too many shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.models.protocol import CausalModel

Schedule = list[list[tuple[int, int]]]


def _poisoned(
    form: CacheForm, num_blocks: int, *, block_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    stored = form.storage_dtype(dtype)
    value = 77 if stored is torch.int8 else float("nan")
    kv = torch.full((num_blocks, *form.shape_beside(block_tokens)), value, dtype=stored)
    form.floats(kv).fill_(float("nan"))
    return kv


def _state(
    form: CacheForm, num_rows: int, *, block_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows begin with zeros; the last one, which is nobody's, is NaN."""
    state = _poisoned(form, num_rows + 1, block_tokens=block_tokens, dtype=dtype)
    state[:-1] = 0
    return state


class PagedRun:
    """Rows of tokens on their way through `model`. `step` runs some tokens of some rows."""

    def __init__(
        self,
        model: CausalModel,
        rows: list[list[int]],
        *,
        block_tokens: int,
        dtype: torch.dtype,
        slots: tuple[int, ...] = (),
    ) -> None:
        """`slots`: the adapter slot of each row."""
        self.model = model
        self.slots = slots
        self.rows = rows
        self.block_tokens = block_tokens
        self.done = [0] * len(rows)
        windows = [
            (form.kind, form.span, form.block_ratio(block_tokens)) for form in model.kv_forms
        ]
        self.windows = list(dict.fromkeys(windows))
        self.group_of_layer = tuple(self.windows.index(window) for window in windows)
        longest = max(-(-len(row) // block_tokens) for row in rows)
        num_blocks = 1 + len(self.windows) * len(rows) * longest
        self.free = list(range(1, num_blocks))
        random.Random(5).shuffle(self.free)
        self.tables = np.zeros((len(self.windows), len(rows), longest), np.int32)
        sizes = {"block_tokens": block_tokens, "dtype": dtype}
        self.kv = tuple(
            _state(form, len(rows), **sizes)
            if form.kind == "state"
            else _poisoned(form, num_blocks, **sizes)
            for form in model.kv_forms
        )

    def step(self, chunks: list[tuple[int, int]], *, last: bool = False) -> list[torch.Tensor]:
        """Runs (row, number of tokens) pairs, single tokens first; returns the logits of each
        chunk's tokens, or of its last token alone."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
        ids, positions = [], []
        for row, count in chunks:
            start = self.done[row]
            positions += range(start, start + count)
            ids += self.rows[row][start : start + count]
        plans = tuple(self._plan(group, chunks) for group in range(len(self.windows)))
        ends = torch.from_numpy(plans[0].host_query_start[1:]).long() - 1
        batch = Batch(
            token_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            plans=plans,
            group_of_layer=self.group_of_layer,
            kv=self.kv,
            logits_at_N=ends if last else torch.arange(len(ids)),
            row_R=torch.tensor([row for row, _ in chunks]),
            slot_T=self._slots([count for _, count in chunks], chunks),
        )
        if last:
            last_token_batch = replace(
                batch,
                plans=tuple(_one_query_each(plan) for plan in plans),
                slot_T=self._slots([1] * len(chunks), chunks),
            )
            batch = replace(batch, last_token_batch=last_token_batch)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch))
        for row, count in chunks:
            self.done[row] += count
        self._free_window_blocks()
        order = [row for row, _ in chunks]
        parts = logits.split([1 if last else count for _, count in chunks])
        return [parts[order.index(row)] for row in sorted(order)]

    def _slots(self, counts: list[int], chunks: list[tuple[int, int]]) -> torch.Tensor | None:
        """The adapter slot of each token."""
        if not self.slots:
            return None
        slots = [self.slots[row] for row, _ in chunks]
        return torch.tensor(np.repeat(slots, counts), dtype=torch.int32)

    def _plan(self, group: int, chunks: list[tuple[int, int]]) -> AttentionPlan:
        slots, kv_len = [], []
        size = self.block_tokens * self.windows[group][2]
        for row, count in chunks:
            start, end = self.done[row], self.done[row] + count
            for position in range(start, end):
                index, offset = divmod(position, size)
                if self.tables[group, row, index] == 0:
                    self.tables[group, row, index] = self.free.pop()
                slots.append(int(self.tables[group, row, index]) * size + offset)
            kv_len.append(end)
        counts = [count for _, count in chunks]
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        host_kv_len = np.array(kv_len, np.int32)
        widest = -(-max(kv_len) // size)
        table = self.tables[group, [row for row, _ in chunks], :widest]
        return AttentionPlan(
            query_start_R1=torch.from_numpy(query_start),
            kv_len_R=torch.from_numpy(host_kv_len),
            block_table_RB=torch.from_numpy(table),
            slot_T=torch.tensor(slots),
            host_query_start=query_start,
            host_kv_len=host_kv_len,
            num_decodes=counts.count(1),
            max_query_len=max(counts),
            max_kv_len=max(kv_len),
        )

    def _free_window_blocks(self) -> None:
        for group, (kind, span, ratio) in enumerate(self.windows):
            for row, done in enumerate(self.done if span else []):
                first = done // span * span if kind == "chunked" else max(0, done - span + 1)
                lowest = first // (self.block_tokens * ratio)
                for index in range(lowest):
                    block = int(self.tables[group, row, index])
                    if block:
                        self.tables[group, row, index] = 0
                        self.free.append(block)
                        for layer, owner in enumerate(self.group_of_layer):
                            if owner == group:
                                self._poison(layer, block)

    def _poison(self, layer: int, block: int) -> None:
        form, kv = self.model.kv_forms[layer], self.kv[layer]
        kv[block] = _poisoned(form, 1, block_tokens=self.block_tokens, dtype=kv.dtype)[0]


def _one_query_each(plan: AttentionPlan) -> AttentionPlan:
    rows = np.arange(len(plan.kv_len_R) + 1, dtype=np.int32)
    return replace(
        plan,
        query_start_R1=torch.from_numpy(rows),
        host_query_start=rows,
        num_decodes=len(rows) - 1,
        max_query_len=1,
    )


def teacher_forced(
    model: CausalModel,
    rows: list[list[int]],
    *,
    block_tokens: int,
    dtype: torch.dtype,
    slots: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """The logits [tokens, V] of every row: each prompt in two uneven chunks, mixed with the decode
    steps of others."""
    run = PagedRun(model, rows, block_tokens=block_tokens, dtype=dtype, slots=slots)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for chunks in schedule([len(row) for row in rows]):
        for (row, _), part in zip(sorted(chunks), run.step(chunks), strict=True):
            logits[row].append(part)
    return [torch.cat(parts) for parts in logits]


def schedule(lengths: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Row i enters at step i; its first two steps take about a third each, then it decodes."""
    done = [0] * len(lengths)
    step = 0
    while any(some < length for some, length in zip(done, lengths, strict=True)):
        chunks = []
        for row, length in enumerate(lengths):
            if row > step or done[row] == length:
                continue
            wanted = length // 3 + row if step - row < 2 else 1
            count = min(wanted, length - done[row])
            chunks.append((row, count))
            done[row] += count
        yield chunks
        step += 1


def random_rows(vocabulary: int, lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Random token ids."""
    pick: Callable[[int], int] = random.Random(seed).randrange
    return [[pick(vocabulary) for _ in range(length)] for length in lengths]
