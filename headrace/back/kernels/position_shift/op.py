"""Positions of a step's tokens moved by a number of each row: what decoding needs behind images,
whose tokens take fewer positions than they are (Wang et al. 2024, Qwen2-VL, section 2.1).

Two ops with one signature: `bind(problem)` returns `f(row_R, query_start_R1, delta_M, positions_T)
-> None`. `position_add` adds delta_M[row] to the positions of each row's query tokens, in place;
`position_subtract` takes it away again. row_R int32 or int64: the row of the runner, M - 1 for
padding, which has no query tokens; query_start_R1 int32; delta_M and positions_T int64. Tokens
behind the last row's are left.

R rows of the step, M rows of the runner and one for padding, T query tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample

PositionShift = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class PositionShiftProblem:
    """The same for every number of rows."""

    device: str


def bind_reference(problem: PositionShiftProblem, *, sign: int) -> PositionShift:
    """The reference; safe in graphs."""

    def shift(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        delta_M: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> None:
        place_T = torch.arange(
            positions_T.shape[0], dtype=query_start_R1.dtype, device=positions_T.device
        )
        index_T = torch.searchsorted(query_start_R1[1:], place_T, right=True)
        row_T = row_R.long().index_select(0, index_T.clamp_(max=row_R.shape[0] - 1))
        delta_T = delta_M.index_select(0, row_T)
        positions_T.add_(delta_T.masked_fill_(place_T >= query_start_R1[-1], 0), alpha=sign)

    return shift


def _sample(problem: PositionShiftProblem) -> Sample:
    """Rows of several tokens, of one, of none (padding), and tokens behind them."""
    new = {"device": problem.device}
    return Sample(
        problem=problem,
        weights=(),
        arguments=(
            torch.tensor([3, 0, 2, 5, 5], dtype=torch.int32, **new),
            torch.tensor([0, 1, 5, 6, 6, 6], dtype=torch.int32, **new),
            torch.tensor([-7, 11, 4, -300, 9, 0], dtype=torch.int64, **new),
            torch.arange(500, 509, dtype=torch.int64, **new),
        ),
    )


def _outputs(sample: Sample) -> list[torch.Tensor]:
    return [sample.arguments[3]]


def _op(name: str, kernel: str, *, sign: int) -> Op[PositionShiftProblem]:
    return Op(
        name=name,
        reference=Kernel(
            name="torch",
            supports=lambda problem: None,
            bind=lambda problem: bind_reference(problem, sign=sign),
            invariant=True,
        ),
        kernels=(
            f"headrace.back.kernels.position_shift.native:{kernel}",
            f"headrace.back.kernels.position_shift.triton_position_shift:{kernel}",
        ),
        sample=_sample,
        tolerance=lambda problem: 0.0,
        outputs=_outputs,
    )


ADD_OP = _op("position_add", "ADD_KERNEL", sign=1)
SUBTRACT_OP = _op("position_subtract", "SUBTRACT_KERNEL", sign=-1)
