"""What records the steps of buckets and replays them: the seam between buckets.py and a device's
graphs (cuda_graphs.py, cpu_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.step_inputs.op import GroupBlocks, StepOut, StepTables
from headrace.back.kernels.upload import host_buffer
from headrace.back.runner.results import StepEvent, StepTensors
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.steps import TakeMasks
from headrace.back.sampling.in_step import AskedRows, StepSamples
from headrace.base.config.resolved import Decision

RING = 8
"""Slots of messages and results; two steps are in flight at most, or one more than a pipeline has
stages, so a slot is long free when it is used again."""


@dataclass(frozen=True)
class DeferredSampling:
    """The part of a step that waits for masks: what comes before it is on the device's way when
    `take_masks` is called, and `sample` is recorded apart from it."""

    take_masks: TakeMasks
    sample: Callable[[Bucket, StepTensors], StepTensors]

    def __call__(self, bucket: Bucket, tensors: StepTensors) -> StepTensors:
        """Runs it on what the step has left."""
        self.take_masks()
        return self.sample(bucket, tensors)


class Replay(Protocol):
    """Runs the step of a bucket, by calling it or by replaying what it once did; and knows the
    device's streams. `on_host`: a step has run when `run` returns."""

    on_host: bool

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

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        """Runs the bucket's step on the message that was copied last; `rest`: what follows once
        the step's masks have come."""
        ...

    def wants(self, bucket: Bucket) -> bool:
        """Whether the bucket's step is not recorded and could be."""
        ...

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        """Records the bucket's step, which may run on the message that was copied last."""
        ...

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory that they take, as measured when each was recorded."""
        ...

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the host behind what was launched, beside what is launched later."""
        ...

    def event(self) -> StepEvent:
        """The point behind everything that was launched and read."""
        ...


class SampleRing:
    """RING slots of what steps have sampled: `data` on the device, cut into `slots`; `host`, their
    copies; `samples`: slot, W and whether behind masks -> what is read there. Cut once: each small
    operation of torch costs microseconds, and some give up the interpreter's lock."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.data = torch.zeros((RING, *shape), dtype=torch.int32, device=device)
        self.slots = self.data.unbind()
        host = device.type == "cpu"  # which reads the ring itself
        self.host = self.slots if host else host_buffer((RING, *shape), device).unbind()
        arrays = [slot.numpy() for slot in self.host]
        self.samples = cache(
            lambda slot, words, masked: StepSamples.of(arrays[slot], words, masked=masked)
        )


class StaticTensors:
    """The tensors that are built anew each step, for the largest bucket; smaller ones take their
    beginnings."""

    def __init__(self, max_tokens: int, tables: StepTables) -> None:
        groups, rows, columns = tables.blocks_GMB.shape
        new = {"dtype": torch.int64, "device": tables.blocks_GMB.device}
        self._token_ids, self._positions = (torch.zeros(max_tokens, **new) for _ in range(2))
        self._slots = torch.zeros(groups * max_tokens, **new)
        self._last = torch.zeros(rows, **new)
        self._kv_len = None if tables.length_M is None else torch.zeros_like(tables.length_M)
        self._tables = zero_table(tables.blocks_GMB.shape, tables.blocks_GMB.device).view(-1)
        self._lengths = None
        if tables.cross_M is not None:
            self._lengths = zero_table((groups * rows,), tables.blocks_GMB.device)
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
            kv_len_R=None if self._kv_len is None else self._kv_len[: bucket.rows],
            lengths_GR=None
            if self._lengths is None
            else self._lengths[: groups * bucket.rows].view(groups, bucket.rows),
        )


@dataclass(frozen=True, kw_only=True)
class StepFrame:
    """A bucket's views of the static tensors. ones_R1: where queries start if each row has one, for
    batches with a rest."""

    out: StepOut
    batch: Batch
    ones_R1: torch.Tensor | None = None


def asked_rows(
    bucket: Bucket,
    out: StepOut,
    kv_len_R: torch.Tensor,
    tokens_MC: torch.Tensor,
    row_R: torch.Tensor,
    starts_R1: torch.Tensor,
    sample_R: torch.Tensor,
) -> AskedRows:
    """The row and position of each token that a step samples, by the sections of its message;
    verified padding is as the last row's."""
    if not bucket.verifies:
        return AskedRows(row_R=row_R, position_R=kv_len_R, sample_R=sample_R, tokens_MC=tokens_MC)
    place_T = torch.arange(bucket.tokens, dtype=torch.int32, device=row_R.device)
    index_T = torch.searchsorted(starts_R1[1:], place_T, right=True)
    index_T = index_T.clamp_(max=bucket.rows - 1)
    return AskedRows(
        row_R=row_R.index_select(0, index_T),
        position_R=(out.positions_T + 1).to(torch.int32),
        sample_R=torch.ones_like(place_T),
        tokens_MC=tokens_MC,
        offset_R=place_T.long() - starts_R1.index_select(0, index_T),
        most_drafts=bucket.queries - 1,
    )


def step_tables(
    *,
    max_rows: int,
    max_model_len: int,
    groups: tuple[GroupBlocks, ...],
    block_tokens: int,
    device: torch.device,
    speculates: bool,
) -> StepTables:
    """Empty tables for all rows; `groups`: the blocks of each. No block is smaller than
    `block_tokens`."""
    spans = [group.span for group in groups]
    columns = -(-max(max_model_len, *spans) // block_tokens) if spans else 1
    return StepTables(
        tokens_MC=zero_table((max_rows + 1, max_model_len + 1), device),
        blocks_GMB=zero_table((len(spans), max_rows + 1, columns), device),
        length_M=zero_table((max_rows + 1,), device) if speculates else None,
        predicted_M=zero_table((max_rows + 1,), device) if speculates else None,
        cross_M=zero_table((max_rows + 1,), device) if any(spans) else None,
    )


def zero_table(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros int32. On a CPU by calloc: pages nobody has written cost no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    return torch.from_numpy(np.zeros(shape, np.int32))
