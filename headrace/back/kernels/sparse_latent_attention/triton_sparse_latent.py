"""Attention over chosen positions of a cache of latents in one Triton kernel: a program takes a
token and sixteen of its heads, and reads the chosen latents in their order. It cuts no list, so
that a query's bits are the same in any step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.attention.triton_softmax import softmax_weights
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sparse_latent_attention.op import (
    SparseLatentAttentionFunction,
    SparseLatentProblem,
)
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

HEADS, POSITIONS = 16, 32
"""Of a tile: heads, as few as a dot takes, and positions."""


@triton.jit
def row_of(start, rows, i_t):
    """The last row that begins at or before the token."""
    b_count = 0
    for first in range(0, rows + 1, 128):
        o_r = first + tl.arange(0, 128)
        b_start = tl.load(start + o_r, mask=o_r <= rows, other=2147483647)
        b_count += tl.sum((b_start <= i_t).to(tl.int32), axis=0)
    return b_count - 1


@triton.jit
def sparse_latent_attention_kernel(
    q, kv, start, table, chosen, out, sinks, rows, table_stride, block_stride, scale,
    HEADS: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, C: tl.constexpr,
    ROTARY: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, S: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of H heads. C: RANK, R: ROTARY, padded. `scale`: in base 2."""
    enter_late(DEPENDENT)
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = RANK + ROTARY
    dtype = kv.dtype.element_ty
    o_h = i_h * H + tl.arange(0, H)
    o_c, o_r, o_s = tl.arange(0, C), tl.arange(0, R), tl.arange(0, S)
    m_h, m_c, m_r = (o_h < HEADS)[:, None], (o_c < RANK)[None, :], (o_r < ROTARY)[None, :]
    p_q = q + (i_t.to(tl.int64) * HEADS + o_h[:, None]) * WIDTH
    b_q = tl.load(p_q + o_c[None, :], mask=m_h & m_c, other=0.0)
    b_qr = tl.load(p_q + RANK + o_r[None, :], mask=m_h & m_r, other=0.0)
    p_blocks = table + tl.minimum(row_of(start, rows, i_t), rows - 1).to(tl.int64) * table_stride
    p_chosen = chosen + i_t.to(tl.int64) * TOP_K
    b_best = tl.full([H], float("-inf"), tl.float32)
    b_total = tl.zeros([H], tl.float32)
    if SINKS:
        b_best = tl.load(sinks + o_h, mask=o_h < HEADS, other=0.0) * 1.4426950408889634
        b_total = tl.full([H], 1.0, tl.float32)
    b_out = tl.zeros([H, C], tl.float32)
    is_padding = i_t >= tl.load(start + rows)
    count = tl.where(is_padding, 0, TOP_K)
    for first in range(0, count, S):
        m_list = first + o_s < TOP_K
        b_at = tl.load(p_chosen + first + o_s, mask=m_list, other=-1)
        m_s = b_at >= 0
        b_at = tl.maximum(b_at, 0)
        b_block = tl.load(p_blocks + b_at // BLOCK_TOKENS, mask=m_s, other=0).to(tl.int64)
        p_kv = kv + (b_block * block_stride + b_at % BLOCK_TOKENS * WIDTH)[:, None]
        b_kv = tl.load(p_kv + o_c[None, :], mask=m_s[:, None] & m_c, other=0.0)
        b_kvr = tl.load(p_kv + RANK + o_r[None, :], mask=m_s[:, None] & m_r, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee")
        b_scores += tl.dot(b_qr, tl.trans(b_kvr), input_precision="ieee")
        b_scores = tl.where(m_s[None, :], b_scores * scale, float("-inf"))
        b_p, b_old, b_best = softmax_weights(b_scores, b_best, 1.0, True)
        b_total = b_total * b_old + tl.sum(b_p, axis=1)
        b_out = b_out * b_old[:, None]
        b_out += tl.dot(b_p.to(dtype), b_kv, input_precision="ieee")
    b_out = b_out / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    p_out = out + (i_t.to(tl.int64) * HEADS + o_h[:, None]) * RANK + o_c[None, :]
    tl.store(p_out, b_out.to(dtype), mask=m_h & m_c)


def bind(
    problem: SparseLatentProblem, sinks_H: torch.Tensor | None = None
) -> SparseLatentAttentionFunction:
    """The kernel of one shape; keeps the sinks."""
    assert problem.sinks == (sinks_H is not None), problem
    heads, rank, rotary = problem.heads, problem.rank, problem.rotary
    constants = {
        "HEADS": heads, "H": HEADS, "RANK": rank, "C": max(16, power_of_two(rank)),
        "ROTARY": rotary, "R": max(16, power_of_two(rotary)), "TOP_K": problem.top_k,
        "S": POSITIONS, "BLOCK_TOKENS": problem.block_tokens, "SINKS": problem.sinks,
    }  # fmt: skip
    scale = problem.scale * 1.4426950408889634

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor
    ) -> torch.Tensor:
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, rank + rotary), q_THW.shape
        assert kv.stride()[1:] == (rank + rotary, 1), kv.stride()
        assert chosen_TK.shape == (len(q_THW), problem.top_k) and chosen_TK.is_contiguous()
        out_THC = q_THW.new_empty((len(q_THW), heads, rank))
        sparse_latent_attention_kernel[(len(q_THW), -(-heads // HEADS))](
            q_THW, kv, plan.query_start_R1, plan.block_table_RB, chosen_TK, out_THC,
            q_THW if sinks_H is None else sinks_H, plan.kv_len_R.shape[0],
            plan.block_table_RB.stride(0), kv.stride(0), scale,
            num_warps=4, **constants, **launch(q_THW.device),
        )  # fmt: skip
        return out_THC

    return attention


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
