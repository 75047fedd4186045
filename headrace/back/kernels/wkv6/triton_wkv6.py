"""RWKV 6's recurrence in Triton: one program per row of the step and head, which keeps the head's
state in registers over the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported
from headrace.back.kernels.wkv6.op import Wkv6, Wkv6Problem, check_weights
from headrace.back.kernels.wkv7.triton_wkv7 import MAX_HEAD_DIM, head_norm, wide


@triton.jit(do_not_specialize=["states"])
def wkv6_kernel(
    r,
    w,
    k,
    v,
    first_weight,
    weight,
    bias,
    y,
    state,
    rows,
    start,
    states,
    r_stride,
    w_stride,
    k_stride,
    v_stride,
    state_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    NORMED: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    i_h = tl.program_id(1)
    o_k = tl.arange(0, BLOCK)
    o_v = tl.arange(0, BLOCK)
    m_k = o_k < D
    m_v = (o_v < D) & (first < last)
    m_s = m_k[:, None] & m_v[None, :]
    o_s = (i_h * D + o_k[:, None]) * D + o_v[None, :]
    b_s = tl.load(state + row * state_stride + o_s, mask=m_s, other=0.0)
    o_key = i_h // PER_KEY * D
    for t in range(first, last):
        b_r = wide(r + t * r_stride + i_h * D + o_k, m_k)
        b_keep = tl.exp(-tl.exp(wide(w + t * w_stride + i_h * D + o_k, m_k)))
        b_k = wide(k + t * k_stride + o_key + o_k, m_k)
        b_v = wide(v + t * v_stride + o_key + o_v, m_v)
        if FIRST:
            b_first = wide(first_weight + i_h * D + o_k, m_k)
            b_o = tl.sum(b_s * b_r[:, None], axis=0)
            b_o += tl.sum(b_r * b_first * b_k, axis=0) * b_v
            b_s = b_s * b_keep[:, None] + b_k[:, None] * b_v[None, :]
        else:
            b_k = b_k * (1.0 - b_keep)
            b_s = b_s * b_keep[:, None] + b_k[:, None] * b_v[None, :]
            b_o = tl.sum(b_s * (b_r * scale)[:, None], axis=0)
        if NORMED:
            b_o = head_norm(b_o, m_v, weight + i_h * D + o_v, bias + i_h * D + o_v, eps, D)
        p_y = y + (t * HEADS + i_h) * D + o_v
        tl.store(p_y, b_o.to(y.dtype.element_ty), mask=m_v)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_s, b_s, mask=m_s)
    if not DEPTH:
        tl.store(state + row * state_stride + o_s, b_s, mask=m_s)


def bind(
    problem: Wkv6Problem,
    first_C: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    bias_C: torch.Tensor | None,
) -> Wkv6:
    """The kernel for one shape of heads."""
    check_weights(problem, first_C, weight_C, bias_C)

    def wkv6(
        r_TC: torch.Tensor,
        w_TC: torch.Tensor,
        k_TG: torch.Tensor,
        v_TG: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = r_TC, w_TC, k_TG, v_TG
        assert all(one.stride(1) == 1 for one in inputs) and state_MHKV.stride(3) == 1
        y_TC = torch.empty(r_TC.shape, dtype=problem.dtype, device=r_TC.device)
        weights = [r_TC if one is None else one for one in (first_C, weight_C, bias_C)]
        wkv6_kernel[(rows.row_R.shape[0], problem.heads)](
            *inputs, *weights, y_TC, state_MHKV, rows.row_R, rows.query_start_R1,
            rows.padding(state_MHKV), *(one.stride(0) for one in inputs), state_MHKV.stride(0),
            problem.head_dim**-0.5, problem.eps, HEADS=problem.heads,
            PER_KEY=problem.heads // problem.key_heads, D=problem.head_dim,
            BLOCK=power_of_two(problem.head_dim, least=16), FIRST=problem.first,
            NORMED=problem.normed, DEPTH=rows.depth, num_warps=4 if problem.head_dim <= 64 else 8,
            enable_fp_fusion=False, **launch(y_TC.device),
        )  # fmt: skip
        return y_TC

    return wkv6


def _supports(problem: Wkv6Problem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"heads of {problem.head_dim} are above {MAX_HEAD_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
