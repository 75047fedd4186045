"""What the recurrent state of a step's rows begins with, and where it is kept behind the step.

Two ops with one signature: `bind(problem)` returns `f(row_R, query_start_R1, kv_len_R, table_RB,
state_MZ, snapshots_SZ) -> None`. All follows from the step's own numbers on the device. With n
query tokens a row begins at position kv_len - n:

    state_begin   at position 0 its state is zeroed; at the end of block i, if table entry i names a
                  snapshot, it is loaded from there; else it goes on
    state_keep    if kv_len is the end of block i and entry i names a snapshot, it is written there

row_R int32 or int64: the row of the state, M for padding, which has no query tokens; the others
int32, as of a step's attention (back/attention/plan.py). state_MZ [M + 1, Z] and snapshots_SZ [S,
Z] uint8: the bytes of all recurrent caches of a row; slot 0 is nobody's.

R rows of the step, M rows of the runner, B blocks of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator

StateRows = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]


@dataclass(frozen=True, kw_only=True)
class StateRowsProblem:
    """The same for every size of state."""

    device: str
    block_tokens: int


def bind_begin(problem: StateRowsProblem) -> StateRows:
    """The reference of `state_begin`; safe in graphs. Padding's row is scratch."""

    def state_begin(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        table_RB: torch.Tensor,
        state_MZ: torch.Tensor,
        snapshots_SZ: torch.Tensor,
    ) -> None:
        row_R = row_R.long()
        start_R = kv_len_R - (query_start_R1[1:] - query_start_R1[:-1])
        slot_R = _slots(problem, table_RB, start_R)
        own_RZ = state_MZ.index_select(0, row_R)
        begin_RZ = torch.where((slot_R > 0)[:, None], snapshots_SZ.index_select(0, slot_R), own_RZ)
        begin_RZ.masked_fill_((start_R <= 0)[:, None], 0)
        state_MZ.index_copy_(0, row_R, begin_RZ)

    return state_begin


def bind_keep(problem: StateRowsProblem) -> StateRows:
    """The reference of `state_keep`; safe in graphs. Slot 0 takes what is not kept."""

    def state_keep(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        table_RB: torch.Tensor,
        state_MZ: torch.Tensor,
        snapshots_SZ: torch.Tensor,
    ) -> None:
        slot_R = _slots(problem, table_RB, kv_len_R)
        snapshots_SZ.index_copy_(0, slot_R, state_MZ.index_select(0, row_R.long()))

    return state_keep


def _slots(
    problem: StateRowsProblem, table_RB: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """int64 [R]: the snapshot at the end of the block before each position; 0 where the position is
    inside a block, or the block has none."""
    size, last = problem.block_tokens, table_RB.shape[1] - 1
    index_R = torch.div(position_R, size, rounding_mode="floor").long() - 1
    entry_R1 = table_RB.gather(1, index_R.clamp(min=0, max=last)[:, None])
    ends_R = (position_R % size == 0) & (index_R >= 0)
    return torch.where(ends_R, entry_R1[:, 0], 0).long()


def _sample(problem: StateRowsProblem) -> Sample:
    """A row that begins, one that begins behind a snapshot, one that goes on inside a block, one
    that goes on at a block's end without a snapshot, and one that ends a block with one."""
    device, size, generator = problem.device, problem.block_tokens, sample_generator()
    numbers = {"dtype": torch.int32, "device": device}
    counts = [3, 2, 1, 1, size]
    ends = [3, size + 2, size + 1 + size // 2, 2 * size + 1, 2 * size]
    table = torch.zeros(5, 3, dtype=torch.int32)
    table[1, 0], table[4, 1] = 2, 3
    state, snapshots = (
        torch.randint(0, 256, (rows, 200), generator=generator, dtype=torch.uint8).to(device)
        for rows in (8, 4)
    )
    return Sample(
        problem=problem,
        weights=(),
        arguments=(
            torch.tensor([6, 0, 3, 1, 4], **numbers),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], **numbers),
            torch.tensor(ends, **numbers),
            table.to(device),
            state,
            snapshots,
        ),
    )


def outputs(sample: Sample) -> list[torch.Tensor]:
    """What has a meaning afterwards: the rows that somebody may own, the slots but nobody's."""
    *_, state_MZ, snapshots_SZ = sample.arguments
    return [state_MZ[:-1], snapshots_SZ[1:]]


BEGIN_OP: Op[StateRowsProblem] = Op(
    name="state_begin",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_begin, invariant=True),
    kernels=(
        "headrace.back.kernels.state_rows.native:BEGIN_KERNEL",
        "headrace.back.kernels.state_rows.triton_state_rows:BEGIN_KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)

KEEP_OP: Op[StateRowsProblem] = Op(
    name="state_keep",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_keep, invariant=True),
    kernels=(
        "headrace.back.kernels.state_rows.native:KEEP_KERNEL",
        "headrace.back.kernels.state_rows.triton_state_rows:KEEP_KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)
