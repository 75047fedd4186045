"""Mamba 2's recurrence in Triton over chunks of a prompt, by matrix products (Dao and Gu 2024,
section 6): one program per row of the step, head and tile of its channels goes from chunk to chunk
with the state S in registers.

With L_i the sum of dt * decay from the chunk's first token to token i:

    y_i = exp(L_i) S c_i + sum_(j <= i) exp(L_i - L_j) (c_i . b_j) dt_j x_j + skip x_i
    S' = exp(L_C) S + sum_j exp(L_C - L_j) dt_j x_j b_j^T

Only differences L_i - L_j with j <= i go into exponentials, which therefore never overflow.
Products are of the inputs' type and summed in float32, S is float32.

Rows of fewer than `ChunkPlan.least` tokens, drafts and decode go token by token
(triton_ssd_scan.py). Where a chunk begins depends on where the step does: a row's last bits depend
on how its prompt is cut.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.triton_chunks import ChunkPlan, unsupported_chunks
from headrace.back.kernels.gated_delta.triton_gated_delta import softplus
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import ANY, long_row_tokens
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.ssd_scan.op import (
    OP,
    SsdScan,
    SsdScanProblem,
    check_weights,
    long_sample,
)
from headrace.back.kernels.ssd_scan.triton_ssd_scan import MAX_STATE_DIM, launch_tokens
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import launch, power_of_two


@triton.jit(do_not_specialize=["states"])
def chunk_scan_kernel(
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
    C: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = long_row_tokens(rows, start, states, LEAST, tl.program_id(2))
    i_h = tl.program_id(1)
    DTYPE: tl.constexpr = x.dtype.element_ty
    o_i = tl.arange(0, C)
    o_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    m_p = (o_p < P) & (first < last)
    m_n = o_n < N
    m_s = m_n[:, None] & m_p[None, :]
    m_past = o_i[:, None] >= o_i[None, :]
    p_s = state + row * state_stride + (i_h * P + o_p[None, :]) * N + o_n[:, None]
    b_s = tl.load(p_s, mask=m_s, other=0.0)
    b_decay = tl.load(decay + i_h)
    b_bias = tl.load(bias + i_h)
    b_skip = tl.load(skip + i_h)
    for i in tl.range(0, ((last - first + C - 1) // C).to(tl.int32), num_stages=STAGES):
        begin = first + i * C
        m_t = begin + o_i < last
        m_tn = m_t[:, None] & m_n[None, :]
        m_tp = m_t[:, None] & m_p[None, :]
        p_x = x + begin * x_stride + i_h * P
        p_b = b + begin * b_stride + i_h // PER_GROUP * N
        p_c = c + begin * c_stride + i_h // PER_GROUP * N
        p_dt = dt + begin * dt_stride + i_h
        b_x = tl.load(p_x + (o_i[:, None] * x_stride + o_p[None, :]), mask=m_tp, other=0.0)
        b_b = tl.load(p_b + (o_i[:, None] * b_stride + o_n[None, :]), mask=m_tn, other=0.0)
        b_c = tl.load(p_c + (o_i[:, None] * c_stride + o_n[None, :]), mask=m_tn, other=0.0)
        b_dt = tl.load(p_dt + o_i * dt_stride, mask=m_t, other=0.0).to(tl.float32)
        b_dt = tl.minimum(tl.maximum(softplus(b_dt + b_bias), low), high)
        b_dt = tl.where(m_t, b_dt, 0.0)
        b_l = tl.cumsum(b_dt * b_decay, axis=0)
        b_total = tl.sum(b_dt * b_decay, axis=0)
        b_since = tl.exp(tl.minimum(b_l[:, None] - b_l[None, :], 0.0)) * b_dt[None, :]
        b_cb = tl.dot(b_c, tl.trans(b_b), input_precision="ieee") * b_since
        b_cb = tl.where(m_past, b_cb, 0.0).to(DTYPE)
        b_y = tl.dot(b_c, b_s.to(DTYPE), input_precision="ieee") * tl.exp(b_l)[:, None]
        b_y = tl.dot(b_cb, b_x, b_y, input_precision="ieee")
        b_y += b_skip * b_x.to(tl.float32)
        p_y = y + (begin * HEADS + i_h) * P + (o_i[:, None] * (HEADS * P) + o_p[None, :])
        tl.store(p_y, b_y.to(DTYPE), mask=m_tp)
        b_behind = b_dt * tl.exp(tl.minimum(b_total - b_l, 0.0))
        b_in = (b_x.to(tl.float32) * b_behind[:, None]).to(DTYPE)
        b_s = tl.dot(tl.trans(b_b), b_in, b_s * tl.exp(b_total), input_precision="ieee")
    tl.store(p_s, b_s, mask=m_s)


def plan_of(problem: SsdScanProblem) -> ChunkPlan:
    """The plan of Hopper, measured on an H200 (benchmarks.lab.chunks)."""
    state_dim = power_of_two(problem.state_dim, least=16)
    return ChunkPlan(columns=64, stages=fitting_stages(2, 4 * 64 * (2 * state_dim + 64)))


def bind_with(
    problem: SsdScanProblem,
    decay_H: torch.Tensor,
    bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    plan: ChunkPlan,
) -> SsdScan:
    """The kernel for one shape of heads, by this plan."""
    weights = decay_H, bias_H, skip_H
    check_weights(problem, *weights)
    heads, head_dim, state_dim = problem.heads, problem.head_dim, problem.state_dim
    columns = min(plan.columns, power_of_two(head_dim, least=16))

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
        short = rows.decode or rows.trail is not None or len(x_THP) < plan.least
        most = ANY if short else plan.least - 1
        launch_tokens(problem, weights, inputs, y_THP, state_MHPN, rows, most)
        if short:
            return y_THP
        grid = triton.cdiv(head_dim, columns), heads, rows.row_R.shape[0]
        chunk_scan_kernel[grid](
            *inputs, *weights, y_THP, state_MHPN, rows.row_R, rows.query_start_R1,
            rows.padding(state_MHPN), *(one.stride(0) for one in inputs), state_MHPN.stride(0),
            *problem.limits, HEADS=heads, PER_GROUP=heads // problem.groups, P=head_dim, N=state_dim,
            BLOCK_P=columns, BLOCK_N=power_of_two(state_dim, least=16), C=plan.chunk,
            LEAST=plan.least, STAGES=plan.stages, num_warps=plan.warps, **launch(x_THP.device),
        )  # fmt: skip
        return y_THP

    return ssd_scan


def bind(
    problem: SsdScanProblem, decay_H: torch.Tensor, bias_H: torch.Tensor, skip_H: torch.Tensor
) -> SsdScan:
    """The kernel for one shape of heads."""
    return bind_with(problem, decay_H, bias_H, skip_H, plan=plan_of(problem))


def _supports(problem: SsdScanProblem) -> str | None:
    if problem.state_dim > MAX_STATE_DIM:
        return f"a state of {problem.state_dim} is above {MAX_STATE_DIM}"
    return unsupported_chunks(problem.device, problem.dtype)


def _plans(problem: SsdScanProblem) -> list[PlanCheck]:
    return [
        PlanCheck(name="tokens", sample=partial(OP.sample, problem), bind=bind),
        PlanCheck(name="chunks", sample=partial(long_sample, problem), bind=bind),
    ]


KERNEL = Kernel(name="triton chunks", supports=_supports, bind=bind, plans=_plans)
