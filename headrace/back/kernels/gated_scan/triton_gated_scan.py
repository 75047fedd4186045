"""A gated linear recurrence in Triton: one program per row of the step and tile of channels,
over the row's tokens. What other recurrent kernels share stands here: which tokens are a row's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.op import GatedScan, GatedScanProblem, ScanRows
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 256
ANY = (1 << 31) - 1
"""Tokens of a row that no row has more of."""


@triton.jit
def row_tokens(rows, start, states, i_r):
    """The state's row, the first token and the one behind the last; no tokens for padding, whatever
    row it names."""
    row = tl.load(rows + i_r).to(tl.int64)
    first = tl.load(start + i_r).to(tl.int64)
    last = tl.load(start + i_r + 1).to(tl.int64)
    owned = (row >= 0) & (row < states)
    return tl.where(owned, row, 0), first, tl.where(owned, last, first)


@triton.jit
def short_row_tokens(rows, start, states, most, i_r):
    """The same; no tokens for rows that have more than `most`, which another kernel takes."""
    row, first, last = row_tokens(rows, start, states, i_r)
    return row, first, tl.where(last - first > most, first, last)


@triton.jit
def long_row_tokens(rows, start, states, LEAST: tl.constexpr, i_r):
    """The same; no tokens for rows that have fewer than LEAST."""
    row, first, last = row_tokens(rows, start, states, i_r)
    return row, first, tl.where(last - first < LEAST, first, last)


@triton.jit
def behind(row, t, first, states, i_r, DEPTH: tl.constexpr):
    """The row of the state that token t leaves its own in, where all are kept."""
    return tl.where(t > first, states.to(tl.int64) + i_r * DEPTH + t - first, row)


@triton.jit(do_not_specialize=["states"])
def gated_scan_kernel(
    gate,
    x,
    y,
    state,
    rows,
    start,
    states,
    state_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    o_e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_e = (o_e < WIDTH) & (first < last)
    p_state = state + row * state_stride + o_e
    b_y = tl.load(p_state, mask=m_e, other=0.0)
    for t in range(first, last):
        o_t = t * WIDTH + o_e
        b_gate = tl.load(gate + o_t, mask=m_e, other=0.0)
        b_y += (1.0 - b_gate) * (tl.load(x + o_t, mask=m_e, other=0.0) - b_y)
        tl.store(y + o_t, b_y, mask=m_e)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_e, b_y, mask=m_e)
    if not DEPTH:
        tl.store(p_state, b_y, mask=m_e)


def bind(problem: GatedScanProblem) -> GatedScan:
    """The kernel for every width."""

    def gated_scan(
        gate_TE: torch.Tensor, x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        assert gate_TE.is_contiguous() and x_TE.is_contiguous(), (gate_TE.stride(), x_TE.stride())
        y_TE, width = torch.empty_like(x_TE), x_TE.shape[1]
        gated_scan_kernel[(rows.row_R.shape[0], triton.cdiv(width, TILE))](
            gate_TE, x_TE, y_TE, state_ME, rows.row_R, rows.query_start_R1, rows.padding(state_ME),
            state_ME.stride(0), WIDTH=width, BLOCK=TILE, DEPTH=rows.depth, num_warps=4, **launch(x_TE.device),
        )  # fmt: skip
        return y_TE

    return gated_scan


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
