"""Mamba 2's recurrence in Triton: one program per row of the step, head and tile of its
channels, whose state it keeps in registers over the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.triton_gated_delta import softplus
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import ANY, behind, short_row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem, check_weights
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

CHANNELS = 16
MAX_STATE_DIM = 256


@triton.jit(do_not_specialize=["states", "most"])
def ssd_scan_kernel(
    x,
    dt,
    b,
    c,
    decay,
    bias,
    skip,
    y,
    state,
    rows,
    start,
    states,
    most,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride,
    low,
    high,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = short_row_tokens(rows, start, states, most, tl.program_id(0))
    i_h = tl.program_id(1)
    o_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    m_p = (o_p < P) & (first < last)
    m_n = o_n < N
    m_s = m_p[:, None] & m_n[None, :]
    o_s = (i_h * P + o_p[:, None]) * N + o_n[None, :]
    b_s = tl.load(state + row * state_stride + o_s, mask=m_s, other=0.0)
    b_decay = tl.load(decay + i_h)
    b_bias = tl.load(bias + i_h)
    b_skip = tl.load(skip + i_h)
    o_group = i_h // PER_GROUP * N + o_n
    for t in range(first, last):
        b_dt = softplus(tl.load(dt + t * dt_stride + i_h).to(tl.float32) + b_bias)
        b_dt = tl.minimum(tl.maximum(b_dt, low), high)
        b_x = tl.load(x + t * x_stride + i_h * P + o_p, mask=m_p, other=0.0).to(tl.float32)
        b_b = tl.load(b + t * b_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
        b_c = tl.load(c + t * c_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
        b_s = b_s * tl.exp(b_dt * b_decay) + (b_x * b_dt)[:, None] * b_b[None, :]
        b_y = tl.sum(b_s * b_c[None, :], axis=1) + b_skip * b_x
        p_y = y + (t * HEADS + i_h) * P + o_p
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_p)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_s, b_s, mask=m_s)
    if not DEPTH:
        tl.store(state + row * state_stride + o_s, b_s, mask=m_s)


def launch_tokens(
    problem: SsdScanProblem,
    weights: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    y_THP: torch.Tensor,
    state_MHPN: torch.Tensor,
    rows: ScanRows,
    most: int = ANY,
) -> None:
    """The kernel over the rows of at most so many tokens."""
    x_THP, _, b_TGN, c_TGN = inputs
    heads, head_dim, state_dim = problem.heads, problem.head_dim, problem.state_dim
    assert x_THP.stride()[1:] == (head_dim, 1) and state_MHPN.stride(3) == 1, x_THP.stride()
    assert b_TGN.stride()[1:] == c_TGN.stride()[1:] == (state_dim, 1), b_TGN.stride()
    grid = rows.row_R.shape[0], heads, triton.cdiv(head_dim, CHANNELS)
    ssd_scan_kernel[grid](
        *inputs, *weights, y_THP, state_MHPN, rows.row_R, rows.query_start_R1,
        rows.padding(state_MHPN), most, *(one.stride(0) for one in inputs), state_MHPN.stride(0),
        *problem.limits, HEADS=heads, PER_GROUP=heads // problem.groups, P=head_dim, N=state_dim,
        BLOCK_P=CHANNELS, BLOCK_N=power_of_two(state_dim, least=16), DEPTH=rows.depth, num_warps=2,
        **launch(x_THP.device),
    )  # fmt: skip


def bind(
    problem: SsdScanProblem, decay_H: torch.Tensor, bias_H: torch.Tensor, skip_H: torch.Tensor
) -> SsdScan:
    """The kernel for one shape of heads."""
    weights = decay_H, bias_H, skip_H
    check_weights(problem, *weights)

    def ssd_scan(
        x_THP: torch.Tensor,
        dt_TH: torch.Tensor,
        b_TGN: torch.Tensor,
        c_TGN: torch.Tensor,
        state_MHPN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
        inputs = x_THP, dt_TH, b_TGN, c_TGN
        launch_tokens(problem, weights, inputs, y_THP, state_MHPN, rows)
        return y_THP

    return ssd_scan


def _supports(problem: SsdScanProblem) -> str | None:
    if problem.state_dim > MAX_STATE_DIM:
        return f"a state of {problem.state_dim} is above {MAX_STATE_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
