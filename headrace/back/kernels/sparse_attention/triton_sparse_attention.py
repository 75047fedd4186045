"""Attention over chosen positions of a cache of keys and values in one Triton kernel: a program
takes a token and the queries of one KV head, sixteen at a time, and reads the chosen positions in
their order. It cuts no list, so that a query's bits are the same in any step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.attention.triton_softmax import softmax_weights
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sparse_attention.op import (
    SparseAttentionFunction,
    SparseAttentionProblem,
)
from headrace.back.kernels.sparse_latent_attention.triton_sparse_latent import row_of
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

HEADS, POSITIONS = 16, 32
"""Of a tile: heads, as few as a dot takes, and positions."""


@triton.jit
def sparse_attention_kernel(
    q, kv, start, table, chosen, out, rows, table_stride, block_stride, half_stride, head_stride,
    scale, HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, LISTS: tl.constexpr, TOP_K: tl.constexpr,
    S: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, KV heads x TILES of H of their GROUP query heads. D: WIDTH, padded. `scale`: in
    base 2."""
    enter_late(DEPENDENT)
    i_t, i_k, i_h = tl.program_id(0), tl.program_id(1) // TILES, tl.program_id(1) % TILES
    dtype = kv.dtype.element_ty
    o_g, o_d, o_s = i_h * H + tl.arange(0, H), tl.arange(0, D), tl.arange(0, S)
    m_g, m_d = (o_g < GROUP)[:, None], (o_d < WIDTH)[None, :]
    o_q = (i_t.to(tl.int64) * HEADS + i_k * GROUP + o_g[:, None]) * WIDTH + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_g & m_d, other=0.0)
    p_blocks = table + tl.minimum(row_of(start, rows, i_t), rows - 1).to(tl.int64) * table_stride
    i_list = i_k if LISTS > 1 else 0
    p_chosen = chosen + (i_t.to(tl.int64) * LISTS + i_list) * TOP_K
    b_best = tl.full([H], float("-inf"), tl.float32)
    b_total = tl.zeros([H], tl.float32)
    b_out = tl.zeros([H, D], tl.float32)
    is_padding = i_t >= tl.load(start + rows)
    count = tl.where(is_padding, 0, TOP_K)
    for first in range(0, count, S):
        b_at = tl.load(p_chosen + first + o_s, mask=first + o_s < TOP_K, other=-1)
        m_s = b_at >= 0
        b_at = tl.maximum(b_at, 0)
        b_block = tl.load(p_blocks + b_at // BLOCK_TOKENS, mask=m_s, other=0).to(tl.int64)
        o_kv = b_block * block_stride + i_k * head_stride + b_at % BLOCK_TOKENS * WIDTH
        p_k = kv + o_kv[:, None] + o_d[None, :]
        b_k = tl.load(p_k, mask=m_s[:, None] & m_d, other=0.0)
        b_v = tl.load(p_k + half_stride, mask=m_s[:, None] & m_d, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_scores = tl.where(m_s[None, :], b_scores * scale, float("-inf"))
        b_p, b_old, b_best = softmax_weights(b_scores, b_best, 1.0, True)
        b_total = b_total * b_old + tl.sum(b_p, axis=1)
        b_out = b_out * b_old[:, None]
        b_out += tl.dot(b_p.to(dtype), b_v, input_precision="ieee")
    b_out = b_out / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    tl.store(out + o_q, b_out.to(dtype), mask=m_g & m_d)


def bind(problem: SparseAttentionProblem) -> SparseAttentionFunction:
    """The kernel of one shape."""
    heads, kv_heads, width = problem.heads, problem.kv_heads, problem.head_dim
    group = heads // kv_heads
    tiles = -(-group // HEADS)
    constants = {
        "HEADS": heads, "GROUP": group, "H": HEADS, "TILES": tiles, "WIDTH": width,
        "D": max(16, power_of_two(width)), "LISTS": problem.lists, "TOP_K": problem.top_k,
        "S": POSITIONS, "BLOCK_TOKENS": problem.block_tokens,
    }  # fmt: skip
    scale = problem.scale * 1.4426950408889634

    def attention(
        q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TGS: torch.Tensor
    ) -> torch.Tensor:
        q_THD = q_THD.contiguous()
        assert q_THD.shape[1:] == (heads, width), q_THD.shape
        assert kv.stride()[3:] == (width, 1), kv.stride()
        assert chosen_TGS.shape == (len(q_THD), problem.lists, problem.top_k), chosen_TGS.shape
        out_THD = torch.empty_like(q_THD)
        sparse_attention_kernel[(len(q_THD), kv_heads * tiles)](
            q_THD, kv, plan.query_start_R1, plan.block_table_RB, chosen_TGS.contiguous(), out_THD,
            plan.kv_len_R.shape[0], plan.block_table_RB.stride(0), *kv.stride()[:3], scale,
            num_warps=4, **constants, **launch(q_THD.device),
        )  # fmt: skip
        return out_THD

    return attention


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
