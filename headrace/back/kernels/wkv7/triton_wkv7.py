"""RWKV 7's recurrence in Triton: one program per row of the step and head, which keeps the head's
state in registers over the row's tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported
from headrace.back.kernels.wkv7.op import FASTEST, LEAST_LENGTH, Wkv7, Wkv7Problem, check_weights

MAX_HEAD_DIM = 128


@triton.jit
def wide(p_x, mask):
    """Values in float32."""
    return tl.load(p_x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def head_norm(b_o, m_v, p_weight, p_bias, eps, D: tl.constexpr):
    """The layer norm of a head, with its weight and bias."""
    mean = tl.sum(tl.where(m_v, b_o, 0.0), axis=0) / D
    b_centred = tl.where(m_v, b_o - mean, 0.0)
    factor = tl.rsqrt(tl.sum(b_centred * b_centred, axis=0) / D + eps)
    b_weight = tl.load(p_weight, mask=m_v, other=0.0)
    return b_centred * factor * b_weight + tl.load(p_bias, mask=m_v, other=0.0)


@triton.jit(do_not_specialize=["states"])
def wkv7_kernel(
    r,
    w,
    k,
    v,
    a,
    first_value,
    mix,
    removal,
    scale,
    bonus,
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
    a_stride,
    first_stride,
    mix_stride,
    state_stride,
    fastest,
    least,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    MIXES: tl.constexpr,
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
    o_kh, o_vh = i_h * D + o_k, i_h * D + o_v
    b_removal, b_scale, b_bonus = (
        wide(removal + o_kh, m_k),
        wide(scale + o_kh, m_k),
        wide(bonus + o_kh, m_k),
    )
    for t in range(first, last):
        b_r, b_k = wide(r + t * r_stride + o_kh, m_k), wide(k + t * k_stride + o_kh, m_k)
        b_v = wide(v + t * v_stride + o_vh, m_v)
        if MIXES:
            b_first = wide(first_value + t * first_stride + o_vh, m_v)
            b_v += (b_first - b_v) * tl.sigmoid(wide(mix + t * mix_stride + o_vh, m_v))
        b_rate = tl.sigmoid(wide(a + t * a_stride + o_kh, m_k))
        b_keep = tl.exp(fastest * tl.sigmoid(wide(w + t * w_stride + o_kh, m_k)))
        b_u = b_k * b_removal
        b_u = b_u / tl.maximum(tl.sqrt(tl.sum(b_u * b_u, axis=0)), least)
        b_k = b_k * (1.0 + (b_rate - 1.0) * b_scale)
        b_known = tl.sum(b_s * b_u[:, None], axis=0)
        b_s = b_s * b_keep[:, None] - (b_u * b_rate)[:, None] * b_known[None, :]
        b_s += b_k[:, None] * b_v[None, :]
        b_o = tl.sum(b_s * b_r[:, None], axis=0)
        if NORMED:
            b_o = head_norm(b_o, m_v, weight + o_vh, bias + o_vh, eps, D)
        b_o += tl.sum(b_r * b_bonus * b_k, axis=0) * b_v
        tl.store(y + t * HEADS * D + o_vh, b_o.to(y.dtype.element_ty), mask=m_v)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_s, b_s, mask=m_s)
    if not DEPTH:
        tl.store(state + row * state_stride + o_s, b_s, mask=m_s)


def bind(problem: Wkv7Problem, *weights: torch.Tensor | None) -> Wkv7:
    """The kernel for one shape of heads."""
    check_weights(problem, *weights)

    def wkv7(*arguments: Any) -> torch.Tensor:
        *inputs, state_MHKV, rows = arguments
        assert all(one.stride(1) == 1 for one in inputs) and state_MHKV.stride(3) == 1
        y_TC = torch.empty(inputs[0].shape, dtype=problem.dtype, device=inputs[0].device)
        inputs += inputs[:2] * (not problem.mixes)  # somewhere to point to
        pointed = [inputs[0] if one is None else one for one in weights]
        wkv7_kernel[(rows.row_R.shape[0], problem.heads)](
            *inputs, *pointed, y_TC, state_MHKV, rows.row_R, rows.query_start_R1,
            rows.padding(state_MHKV), *(one.stride(0) for one in inputs), state_MHKV.stride(0),
            FASTEST, LEAST_LENGTH, problem.eps, HEADS=problem.heads, D=problem.head_dim,
            BLOCK=power_of_two(problem.head_dim, least=16), MIXES=problem.mixes,
            NORMED=problem.normed, DEPTH=rows.depth, num_warps=4 if problem.head_dim <= 64 else 8,
            enable_fp_fusion=False, **launch(y_TC.device),
        )  # fmt: skip
        return y_TC

    return wkv7


def _supports(problem: Wkv7Problem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"heads of {problem.head_dim} are above {MAX_HEAD_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
