"""The gated delta rule in Triton over chunks of a prompt, by matrix products (Yang et al. 2024,
"Gated delta networks", section 3.3; per channel: Kimi Team 2025, section 3.2).

With L_i the sum of the logarithms of what is kept from the chunk's first token to token i, and S
the state before the chunk, the corrections u of a chunk's tokens solve a triangular system:

    (I + A) u = beta v - beta exp(L) k S,   A_ij = beta_i (k_i . k_j) exp(L_i - L_j) for j < i
    y_i = exp(L_i) q_i S + sum_(j <= i) (q_i . k_j) exp(L_i - L_j) u_j
    S' = exp(L_C) S + sum_j exp(L_C - L_j) k_j u_j^T

What does not read S is computed for all chunks at once (triton_chunk_products.py): T = (I + A)^-1,
U = T beta v, W = T beta exp(L) k, and the queries, keys and weights of what follows. One program
per row, head and tile of the state's columns then goes from chunk to chunk with S in registers
(`chunk_states_kernel`): u = U - W S. Only differences L_i - L_j with j <= i go into exponentials,
which therefore never overflow. Products are of the inputs' type and summed in float32, S is
float32.

Rows of fewer than `ChunkPlan.least` tokens, drafts and decode go token by token
(triton_gated_delta.py). Where a chunk begins depends on where the step does: a row's last bits
depend on how its prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.op import (
    NORM_EPS,
    OP,
    GatedDelta,
    GatedDeltaProblem,
    check_weights,
    long_sample,
)
from headrace.back.kernels.gated_delta.triton_chunk_products import PART, chunk_products_kernel
from headrace.back.kernels.gated_delta.triton_gated_delta import MAX_KEY_DIM, launch_tokens
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import ANY, long_row_tokens
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages, shared_bytes
from headrace.back.kernels.triton.wrap import (
    capability,
    interpreted,
    launch,
    power_of_two,
    product_precision,
    unsupported,
)


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """`chunk`: tokens; `columns`: of a program's part of the state; `least`: tokens of a row that
    goes by chunks; warps of the two kernels; `stages`: chunks on their way at once."""

    chunk: int = 64
    columns: int = 32
    least: int = 32
    product_warps: int = 4
    warps: int = 4
    stages: int = 3


@triton.jit(do_not_specialize=["states"])
def chunk_states_kernel(
    y,
    w,
    queries,
    keys,
    weights,
    kept,
    state,
    rows,
    start,
    states,
    state_stride,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    LEAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y over U, and the row's state."""
    enter(DEPENDENT)
    i_r = tl.program_id(2)
    i_h = tl.program_id(1)
    row, first, last = long_row_tokens(rows, start, states, LEAST, i_r)
    DTYPE: tl.constexpr = w.dtype.element_ty
    o_i = tl.arange(0, C)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = (o_v < V) & (first < last)
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + row * state_stride + (i_h * K + o_k[:, None]) * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0)
    place = first // C + i_r
    chunks = ((last - first + C - 1) // C).to(tl.int32)
    for i in tl.range(0, chunks, num_stages=STAGES):
        begin = first + i * C
        m_t = begin + o_i < last
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        i_t = begin * HEADS + i_h
        o_t = o_i[:, None] * HEADS
        o_tk = o_t * K + o_k[None, :]
        p_y = y + i_t * V + (o_t * V + o_v[None, :])
        b_w = tl.load(w + i_t * K + o_tk, mask=m_tk, other=0.0)
        b_u = tl.load(p_y, mask=m_tv, other=0.0)
        b_q = tl.load(queries + i_t * K + o_tk, mask=m_tk, other=0.0)
        b_k = tl.load(keys + i_t * K + o_tk, mask=m_tk, other=0.0)
        b_p = tl.load(weights + i_t * C + (o_t * C + o_i[None, :]), mask=m_t[:, None], other=0.0)
        o_kept = (place + i) * HEADS + i_h
        if CHANNELS:
            b_kept = tl.load(kept + o_kept * K + o_k, mask=m_k, other=0.0)[:, None]
        else:
            b_kept = tl.load(kept + o_kept)
        b_before = b_s.to(DTYPE)
        b_u = b_u.to(tl.float32) - tl.dot(b_w, b_before, input_precision="ieee")
        b_y = tl.dot(b_q, b_before, input_precision="ieee")
        b_u = b_u.to(DTYPE)
        b_s = tl.dot(tl.trans(b_k), b_u, b_s * b_kept, input_precision="ieee")
        b_y = tl.dot(b_p, b_u, b_y, input_precision="ieee")
        tl.store(p_y, b_y.to(DTYPE), mask=m_tv)
    tl.store(p_s, b_s, mask=m_s)


def plan_of(problem: GatedDeltaProblem) -> ChunkPlan:
    """The plan of Hopper, measured on an H200 (benchmarks.lab.chunks). Never one stage: ptxas of
    CUDA 12.8 then gives descriptors of tiles of 32 columns a wrong address."""
    if problem.per_channel:
        return ChunkPlan(product_warps=8, stages=fitting_stages(2, 1 << 16))
    key_dim = power_of_two(problem.key_dim, least=PART.value)
    stage = 2 * 64 * (3 * key_dim + 64 + 32)
    return ChunkPlan(stages=3 if shared_bytes() > 3 * stage else fitting_stages(3, 2 * stage))


def bind_with(
    problem: GatedDeltaProblem, decay_H: torch.Tensor, bias: torch.Tensor, *, plan: ChunkPlan
) -> GatedDelta:
    """The kernels for one shape of heads, by this plan."""
    check_weights(problem, decay_H, bias)
    of_heads = decay_H, bias.contiguous()
    heads, key_dim, value_dim, chunk = problem.heads, problem.key_dim, problem.value_dim, plan.chunk
    block_k = power_of_two(key_dim, least=PART.value)
    columns = min(plan.columns, power_of_two(value_dim, least=16))
    precision = product_precision(problem.dtype)
    common = {"HEADS": heads, "K": key_dim, "V": value_dim, "BLOCK_K": block_k, "C": chunk}
    common |= {"LEAST": plan.least, "CHANNELS": problem.per_channel}

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
        inputs, tokens, count = (q_TGK, k_TGK, v_THV, a, b_TH), len(v_THV), len(rows.row_R)
        short = rows.decode or rows.trail is not None or tokens < plan.least
        most = ANY if short else plan.least - 1
        launch_tokens(problem, of_heads, inputs, y_THV, state_MHKV, rows, most)
        if short:
            return y_THV
        places = tokens // chunk + count
        w, queries, keys = (y_THV.new_empty(tokens, heads, key_dim) for _ in range(3))
        weights = y_THV.new_empty(tokens, heads, chunk)
        kept = state_MHKV.new_empty(places, heads, key_dim if problem.per_channel else 1)
        factors = y_THV, w, queries, keys, weights, kept
        at = rows.row_R, rows.query_start_R1, rows.padding(state_MHKV)
        chunk_products_kernel[(places, heads)](
            *inputs, *of_heads, *factors, *at, count, *(one.stride(0) for one in inputs),
            key_dim**-0.5, problem.beta_scale, problem.bound, **common,
            PER_KEY=heads // problem.key_heads, BOUNDED=problem.bound < 0, EPS=NORM_EPS,
            PRECISION=precision, num_warps=plan.product_warps, **launch(y_THV.device),
        )  # fmt: skip
        chunk_states_kernel[(triton.cdiv(value_dim, columns), heads, count)](
            *factors, state_MHKV, *at, state_MHKV.stride(0), **common, BLOCK_V=columns,
            STAGES=plan.stages, num_warps=plan.warps, **launch(y_THV.device),
        )  # fmt: skip
        return y_THV

    return gated_delta


def bind(problem: GatedDeltaProblem, decay_H: torch.Tensor, bias: torch.Tensor) -> GatedDelta:
    """The kernels for one shape of heads."""
    return bind_with(problem, decay_H, bias, plan=plan_of(problem))


def unsupported_chunks(device: str, dtype: torch.dtype) -> str | None:
    """The reasons that hold for chunks of every recurrence."""
    reason = unsupported(device, dtype)
    if reason is not None or interpreted():
        return reason
    if torch.version.hip is not None or capability()[0] != 9:
        return "chunks have been run on Hopper alone"
    if dtype is not torch.bfloat16:
        return f"products of chunks are of bfloat16, not {dtype}"
    return None


def _supports(problem: GatedDeltaProblem) -> str | None:
    if problem.key_dim > MAX_KEY_DIM:
        return f"keys of {problem.key_dim} are above {MAX_KEY_DIM}"
    return unsupported_chunks(problem.device, problem.dtype)


def _plans(problem: GatedDeltaProblem) -> list[PlanCheck]:
    return [
        PlanCheck(name="tokens", sample=partial(OP.sample, problem), bind=bind),
        PlanCheck(name="chunks", sample=partial(long_sample, problem), bind=bind),
    ]


KERNEL = Kernel(name="triton chunks", supports=_supports, bind=bind, plans=_plans)
