"""After a step that has verified drafts: the recurrent state of each row goes back to the last
token that stands.

`bind(problem)` returns `f(row_R, query_start_R1, kv_len_R, length_M, state_XZ) -> None`. Row i of
the step, of the runner's row m, began at position kv_len - n with n query tokens, and has
length_M[m] tokens now, the newest of which has no state yet. So of its drafts length_M[m] -
(kv_len - n) - 2 stand. Where there are some, the state behind the last of them, which the step has
left where its `trail` says (op gated_scan), becomes the row's own; where there are none, that lies
there already.

row_R int32 or int64, padding's the row before trail.first, without query tokens; the others int32,
as of a step's attention (back/attention/plan.py). state_XZ uint8 [X, Z]: the bytes of all recurrent
caches.

R rows of the step, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.gated_scan.op import StateTrail
from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator

StateReturn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class StateReturnProblem:
    """The same for every size of state."""

    device: str
    trail: StateTrail


def bind_reference(problem: StateReturnProblem) -> StateReturn:
    """The reference; safe in graphs. Padding's row is scratch."""
    first, depth = problem.trail.first, problem.trail.depth

    def state_return(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        length_M: torch.Tensor,
        state_XZ: torch.Tensor,
    ) -> None:
        row_R = row_R.long()
        queries_R = query_start_R1[1:] - query_start_R1[:-1]
        stand_R = length_M.index_select(0, row_R) - (kv_len_R - queries_R) - 2
        moves_R = (stand_R > 0) & (stand_R < queries_R)
        place_R = torch.arange(row_R.shape[0], device=row_R.device)
        from_R = torch.where(moves_R, first + place_R * depth + stand_R - 1, row_R)
        state_XZ.index_copy_(0, row_R, state_XZ.index_select(0, from_R))

    return state_return


def _sample(problem: StateReturnProblem) -> Sample:
    """Rows of which all drafts stand, one, none; one that has none; padding."""
    device, generator = problem.device, sample_generator()
    numbers = {"dtype": torch.int32, "device": device}
    first, depth = problem.trail.first, problem.trail.depth
    counts = [1 + depth, 1 + depth, 1 + depth, 1, 0]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    begins, rows = [20, 7, 33, 5, 0], [2, 0, first - 2, 1, first - 1]
    length = torch.full((first,), 99)
    for row, begin, stand in zip(rows, begins, (depth, 1, 0, 0), strict=False):
        length[row] = begin + 2 + stand
    state = torch.randint(
        0, 256, (first + len(rows) * depth, 200), generator=generator, dtype=torch.uint8
    )
    ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
    return Sample(
        problem=problem,
        weights=(),
        arguments=(
            torch.tensor(rows, **numbers),
            torch.tensor(starts, **numbers),
            torch.tensor(ends, **numbers),
            length.to(**numbers),
            state.to(device),
        ),
    )


def outputs(sample: Sample) -> list[torch.Tensor]:
    """The rows that somebody may own."""
    return [sample.arguments[-1][: sample.problem.trail.first - 1]]


OP: Op[StateReturnProblem] = Op(
    name="state_return",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.state_return.native:KERNEL",
        "headrace.back.kernels.state_return.triton_state_return:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)
