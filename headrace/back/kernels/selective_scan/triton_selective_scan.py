"""Mamba's selective scan in Triton: one program per row of the step and tile of channels, whose
states it keeps in registers over the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.triton_gated_delta import softplus
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.selective_scan.op import (
    SelectiveScan,
    SelectiveScanProblem,
    check_weights,
)
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

CHANNELS = 32
MAX_STATE_DIM = 256


@triton.jit(do_not_specialize=["states"])
def selective_scan_kernel(
    x,
    dt,
    b,
    c,
    gate,
    decay,
    bias,
    skip,
    y,
    state,
    rows,
    start,
    states,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    state_stride,
    I: tl.constexpr,
    N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    o_n = tl.arange(0, BLOCK_N)
    m_i = (o_i < I) & (first < last)
    m_n = o_n < N
    m_s = m_i[:, None] & m_n[None, :]
    o_s = o_i[:, None] * N + o_n[None, :]
    b_s = tl.load(state + row * state_stride + o_s, mask=m_s, other=0.0)
    b_decay = tl.load(decay + o_s, mask=m_s, other=0.0)
    b_bias = tl.load(bias + o_i, mask=m_i, other=0.0)
    b_skip = tl.load(skip + o_i, mask=m_i, other=0.0)
    for t in range(first, last):
        b_raw = tl.load(dt + t * dt_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_dt = softplus(b_raw + b_bias)
        b_x = tl.load(x + t * x_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_b = tl.load(b + t * b_stride + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_c = tl.load(c + t * c_stride + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_gate = tl.load(gate + t * gate_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_s = b_s * tl.exp(b_dt[:, None] * b_decay) + (b_x * b_dt)[:, None] * b_b[None, :]
        b_y = tl.sum(b_s * b_c[None, :], axis=1) + b_skip * b_x
        b_y *= b_gate * tl.sigmoid(b_gate)
        tl.store(y + t * I + o_i, b_y.to(y.dtype.element_ty), mask=m_i)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_s, b_s, mask=m_s)
    if not DEPTH:
        tl.store(state + row * state_stride + o_s, b_s, mask=m_s)


def bind(
    problem: SelectiveScanProblem,
    decay_IN: torch.Tensor,
    bias_I: torch.Tensor,
    skip_I: torch.Tensor,
) -> SelectiveScan:
    """The kernel for one width."""
    check_weights(problem, decay_IN, bias_I, skip_I)
    decay_IN, channels, state_dim = decay_IN.contiguous(), problem.channels, problem.state_dim

    def selective_scan(
        x_TI: torch.Tensor,
        dt_TI: torch.Tensor,
        b_TN: torch.Tensor,
        c_TN: torch.Tensor,
        gate_TI: torch.Tensor,
        state_MIN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = x_TI, dt_TI, b_TN, c_TN, gate_TI
        assert all(one.stride(1) == 1 for one in inputs), [one.stride() for one in inputs]
        y_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
        selective_scan_kernel[rows.row_R.shape[0], triton.cdiv(channels, CHANNELS)](
            *inputs, decay_IN, bias_I, skip_I, y_TI, state_MIN, rows.row_R, rows.query_start_R1,
            rows.padding(state_MIN), *(one.stride(0) for one in inputs), state_MIN.stride(0),
            I=channels, N=state_dim, BLOCK_I=CHANNELS, BLOCK_N=power_of_two(state_dim, least=16),
            DEPTH=rows.depth, num_warps=2, **launch(x_TI.device),
        )  # fmt: skip
        return y_TI

    return selective_scan


def _supports(problem: SelectiveScanProblem) -> str | None:
    if problem.state_dim > MAX_STATE_DIM:
        return f"a state of {problem.state_dim} is above {MAX_STATE_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
