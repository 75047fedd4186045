"""The Triton kernel: one program per row, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.triton_gated_scan import row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.position_shift.op import PositionShift, PositionShiftProblem
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 256


@triton.jit(do_not_specialize=["states"])
def position_shift_kernel(
    rows,
    start,
    delta,
    positions,
    states,
    SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    b_delta = tl.load(delta + row)
    for o_tile in range(first, last, BLOCK):
        o_t = o_tile + tl.arange(0, BLOCK)
        m_t = o_t < last
        b_t = tl.load(positions + o_t, mask=m_t, other=0)
        tl.store(positions + o_t, b_t + SIGN * b_delta, mask=m_t)


def _bind(problem: PositionShiftProblem, *, sign: int) -> PositionShift:
    def shift(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        delta_M: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> None:
        assert positions_T.is_contiguous() and delta_M.is_contiguous()
        position_shift_kernel[(row_R.shape[0],)](
            row_R, query_start_R1, delta_M, positions_T, delta_M.shape[0] - 1,
            SIGN=sign, BLOCK=TILE, num_warps=4, **launch(positions_T.device),
        )  # fmt: skip

    return shift


def _kernel(*, sign: int) -> Kernel[PositionShiftProblem]:
    return Kernel(
        name="triton",
        supports=lambda problem: unsupported(problem.device, torch.float32),
        bind=lambda problem: _bind(problem, sign=sign),
        invariant=True,
    )


ADD_KERNEL, SUBTRACT_KERNEL = _kernel(sign=1), _kernel(sign=-1)
