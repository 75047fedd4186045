"""The gated delta rule in Triton: one program per row of the step, head and tile of the state's
columns, which it keeps in registers over the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.op import (
    NORM_EPS,
    GatedDelta,
    GatedDeltaProblem,
    check_weights,
)
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import ANY, behind, short_row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

COLUMNS = 16
MAX_KEY_DIM = 256


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), which is x where the sum is."""
    b_log = tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0)))
    return tl.where(b_x > 20.0, b_x, b_log)


@triton.jit
def _normed(p_x, m_k, EPS: tl.constexpr):
    b_x = tl.load(p_x, mask=m_k, other=0.0).to(tl.float32)
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) + EPS)


@triton.jit
def fade_of(b_x, b_decay, bound, BOUNDED: tl.constexpr):
    """The logarithm of what is kept of the state, of one head or of its channels: see the op."""
    if BOUNDED:
        return bound * tl.sigmoid(-b_decay * b_x)
    return b_decay * softplus(b_x)


@triton.jit(do_not_specialize=["states", "most"])
def gated_delta_kernel(
    q,
    k,
    v,
    a,
    b,
    decay,
    bias,
    y,
    state,
    rows,
    start,
    states,
    most,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    state_stride,
    scale,
    beta_scale,
    bound,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = short_row_tokens(rows, start, states, most, tl.program_id(0))
    i_h = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = (o_v < V) & (first < last)
    m_s = m_k[:, None] & m_v[None, :]
    o_s = (i_h * K + o_k[:, None]) * V + o_v[None, :]
    b_s = tl.load(state + row * state_stride + o_s, mask=m_s, other=0.0)
    b_decay = tl.load(decay + i_h)
    o_key = i_h // PER_KEY * K + o_k
    if CHANNELS:
        o_a = i_h * K + o_k
        m_a = m_k
    else:
        o_a = i_h
        m_a = i_h < HEADS
    b_bias = tl.load(bias + o_a, mask=m_a, other=0.0)
    for t in range(first, last):
        b_q = _normed(q + t * q_stride + o_key, m_k, EPS) * scale
        b_k = _normed(k + t * k_stride + o_key, m_k, EPS)
        b_v = tl.load(v + t * v_stride + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_beta = beta_scale * tl.sigmoid(tl.load(b + t * b_stride + i_h).to(tl.float32))
        b_a = tl.load(a + t * a_stride + o_a, mask=m_a, other=0.0).to(tl.float32) + b_bias
        b_keep = tl.exp(fade_of(b_a, b_decay, bound, BOUNDED))
        b_s *= b_keep[:, None] if CHANNELS else b_keep
        b_delta = (b_v - tl.sum(b_s * b_k[:, None], axis=0)) * b_beta
        # Fused by name: left to itself the compiler fuses products and sums otherwise in steps that
        # keep the states behind their tokens (see the launch).
        b_s = tl.fma(
            b_k[:, None].broadcast_to(b_s.shape), b_delta[None, :].broadcast_to(b_s.shape), b_s
        )
        b_y = tl.sum(b_s * b_q[:, None], axis=0)
        p_y = y + (t * HEADS + i_h) * V + o_v
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_v)
        if DEPTH:
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            tl.store(state + kept * state_stride + o_s, b_s, mask=m_s)
    if not DEPTH:
        tl.store(state + row * state_stride + o_s, b_s, mask=m_s)


def launch_tokens(
    problem: GatedDeltaProblem,
    weights: tuple[torch.Tensor, torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    y_THV: torch.Tensor,
    state_MHKV: torch.Tensor,
    rows: ScanRows,
    most: int = ANY,
) -> None:
    """The kernel over the rows of at most so many tokens."""
    q_TGK, k_TGK, v_THV, *_ = inputs
    heads, key_dim, value_dim = problem.heads, problem.key_dim, problem.value_dim
    assert q_TGK.stride()[1:] == k_TGK.stride()[1:] == (key_dim, 1), q_TGK.stride()
    assert v_THV.stride()[1:] == (value_dim, 1) and state_MHKV.stride(3) == 1, v_THV.stride()
    grid = rows.row_R.shape[0], heads, triton.cdiv(value_dim, COLUMNS)
    gated_delta_kernel[grid](
        *inputs, *weights, y_THV, state_MHKV, rows.row_R, rows.query_start_R1,
        rows.padding(state_MHKV), most, *(one.stride(0) for one in inputs), state_MHKV.stride(0),
        key_dim**-0.5, problem.beta_scale, problem.bound, HEADS=heads,
        PER_KEY=heads // problem.key_heads, K=key_dim, V=value_dim,
        BLOCK_K=power_of_two(key_dim, least=16), BLOCK_V=COLUMNS,
        CHANNELS=problem.per_channel, BOUNDED=problem.bound < 0, EPS=NORM_EPS, DEPTH=rows.depth, num_warps=2,
        enable_fp_fusion=False, **launch(v_THV.device),
    )  # fmt: skip


def bind(problem: GatedDeltaProblem, decay_H: torch.Tensor, bias: torch.Tensor) -> GatedDelta:
    """The kernel for one shape of heads."""
    check_weights(problem, decay_H, bias)
    weights = decay_H, bias.contiguous()

    def gated_delta(
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        a: torch.Tensor,
        b_TH: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        y_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
        inputs = q_TGK, k_TGK, v_THV, a, b_TH
        launch_tokens(problem, weights, inputs, y_THV, state_MHKV, rows)
        return y_THV

    return gated_delta


def _supports(problem: GatedDeltaProblem) -> str | None:
    if problem.key_dim > MAX_KEY_DIM:
        return f"keys of {problem.key_dim} are above {MAX_KEY_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
