"""Tokens moved towards those before them in Triton: one program per row of the step and tile of
channels, over the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.token_shift.op import TokenShift, TokenShiftProblem, check_weights
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 256


@triton.jit(do_not_specialize=["states", "tokens"])
def token_shift_kernel(
    x,
    weight,
    y,
    state,
    rows,
    start,
    states,
    tokens,
    x_stride,
    state_stride,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = (o_c < WIDTH) & (first < last)
    b_before = tl.load(state + row * state_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    for t in range(first, last):
        b_raw = tl.load(x + t * x_stride + o_c, mask=m_c, other=0.0)
        b_x = b_raw.to(tl.float32)
        for n in tl.static_range(COUNT):
            b_weight = tl.load(weight + n * WIDTH + o_c, mask=m_c, other=0.0)
            b_y = b_x + (b_before - b_x) * b_weight
            p_y = y + (n * tokens.to(tl.int64) + t) * WIDTH + o_c
            tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_c)
        b_before = b_x
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_c, b_raw, mask=m_c)
    if not DEPTH:
        p_state = state + row * state_stride + o_c
        tl.store(p_state, b_before.to(state.dtype.element_ty), mask=m_c)


def bind(problem: TokenShiftProblem, weight_NE: torch.Tensor) -> TokenShift:
    """The kernel for one width and number of results."""
    check_weights(problem, weight_NE)
    weight_NE = weight_NE.contiguous()

    def token_shift(x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        assert x_TE.stride(1) == state_ME.stride(1) == 1, (x_TE.stride(), state_ME.stride())
        shape = (problem.count, *x_TE.shape)
        y_NTE = torch.empty(shape, dtype=x_TE.dtype, device=x_TE.device)
        grid = rows.row_R.shape[0], triton.cdiv(problem.width, TILE)
        token_shift_kernel[grid](
            x_TE, weight_NE, y_NTE, state_ME, rows.row_R, rows.query_start_R1,
            rows.padding(state_ME), x_TE.shape[0], x_TE.stride(0), state_ME.stride(0),
            WIDTH=problem.width, COUNT=problem.count, BLOCK=TILE, DEPTH=rows.depth, num_warps=4,
            **launch(x_TE.device),
        )  # fmt: skip
        return y_NTE.transpose(0, 1)

    return token_shift


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
