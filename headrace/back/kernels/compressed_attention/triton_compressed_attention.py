"""Attention over a window of latents and over entries of groups in one Triton kernel: a program
takes a token and sixteen of its heads, and reads the window's latents, then the entries, in their
order. It cuts neither, so that a query's bits are the same in any step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.attention.triton_softmax import softmax_weights
from headrace.back.kernels.compressed_attention.op import CompressedAttention, CompressedProblem
from headrace.back.kernels.index_select.triton_index_select import place_of
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

HEADS, LATENTS = 16, 32
"""Of a tile: heads, as few as a dot takes, and latents or entries."""
MAX_WIDTH = 512


@triton.jit
def _add_latents(b_q, p_latents, m_s, m_d, o_d, scale, b_best, b_total, b_out):
    """Maximum, sum and weighted latents with those at p_latents [S] more. `scale`: in base 2."""
    b_kv = tl.load(p_latents[:, None] + o_d[None, :], mask=m_s[:, None] & m_d, other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee") * scale
    b_s = tl.where(m_s[None, :], b_s, float("-inf"))
    b_p, b_shrink, b_best = softmax_weights(b_s, b_best, 1.0, True)
    b_total = b_total * b_shrink + tl.sum(b_p, axis=1)
    b_out = b_out * b_shrink[:, None]
    b_out += tl.dot(b_p.to(b_kv.dtype), b_kv, input_precision="ieee")
    return b_best, b_total, b_out


@triton.jit
def compressed_attention_kernel(
    q, kv, entries, start, length, table, entry_table, chosen, sinks, out, rows, table_stride,
    entry_table_stride, block_stride, entry_stride, scale, HEADS: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, S: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of H heads. D: WIDTH, padded; SIZE: positions that a block of entries
    stands for; `scale`: in base 2."""
    enter_late(DEPENDENT)
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    i_row, position = place_of(start, length, rows, i_t)
    o_h, o_d, o_s = i_h * H + tl.arange(0, H), tl.arange(0, D), tl.arange(0, S)
    m_h, m_d = o_h < HEADS, (o_d < WIDTH)[None, :]
    o_q = (i_t.to(tl.int64) * HEADS + o_h[:, None]) * WIDTH + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_h[:, None] & m_d, other=0.0)
    b_best = tl.load(sinks + o_h, mask=m_h, other=0.0) * 1.4426950408889634
    b_total = tl.full([H], 1.0, tl.float32)
    b_out = tl.zeros([H, D], tl.float32)
    p_blocks = table + i_row.to(tl.int64) * table_stride
    for first in range(tl.maximum(position - WINDOW + 1, 0), position + 1, S):
        o_at = first + o_s
        m_s = o_at <= position
        b_block = tl.load(p_blocks + o_at // BLOCK_TOKENS, mask=m_s, other=0).to(tl.int64)
        p_kv = kv + b_block * block_stride + o_at % BLOCK_TOKENS * WIDTH
        b_best, b_total, b_out = _add_latents(
            b_q, p_kv, m_s, m_d, o_d, scale, b_best, b_total, b_out
        )
    if GROUP:
        whole = (position + 1) // GROUP
        count = tl.where(whole > 0, TOP_K, 0) if TOP_K else whole
        p_entry_blocks = entry_table + i_row.to(tl.int64) * entry_table_stride
        for first in range(0, count, S):
            o_g = first + o_s
            if TOP_K:
                p_chosen = chosen + i_t.to(tl.int64) * TOP_K + o_g
                o_g = tl.load(p_chosen, mask=o_g < TOP_K, other=-1)
            m_s = (o_g >= 0) & (o_g < whole)
            o_last = (tl.maximum(o_g, 0) + 1) * GROUP - 1
            b_block = tl.load(p_entry_blocks + o_last // SIZE, mask=m_s, other=0).to(tl.int64)
            p_entry = entries + b_block * entry_stride + o_last % SIZE // GROUP * WIDTH
            b_best, b_total, b_out = _add_latents(
                b_q, p_entry, m_s, m_d, o_d, scale, b_best, b_total, b_out
            )
    b_out = b_out / b_total[:, None]
    tl.store(out + o_q, b_out.to(out.dtype.element_ty), mask=m_h[:, None] & m_d)


def bind(problem: CompressedProblem, sinks_H: torch.Tensor) -> CompressedAttention:
    """The kernel of one shape; keeps the sinks."""
    heads, width, group = problem.heads, problem.head_dim, problem.group
    sinks_H = sinks_H.float().contiguous()
    constants = {
        "HEADS": heads, "H": HEADS, "WIDTH": width, "D": max(16, power_of_two(width)),
        "WINDOW": problem.window, "GROUP": group, "SIZE": max(problem.block_tokens, group),
        "TOP_K": problem.top_k, "S": LATENTS, "BLOCK_TOKENS": problem.block_tokens,
    }  # fmt: skip
    scale = problem.scale * 1.4426950408889634

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        position_T: torch.Tensor,
        entries: torch.Tensor,
        entry_plan: Plan,
        groups_TK: torch.Tensor,
    ) -> torch.Tensor:
        q_THD = q_THD.contiguous()
        assert q_THD.shape[1:] == (heads, width), q_THD.shape
        assert kv.stride()[1:] == entries.stride()[1:] == (width, 1), kv.stride()
        if problem.top_k:
            assert groups_TK.shape == (len(q_THD), problem.top_k), groups_TK.shape
            assert groups_TK.dtype == torch.int32 and groups_TK.is_contiguous(), groups_TK.dtype
        table, entry_table = plan.block_table_RB, entry_plan.block_table_RB
        out_THD = torch.empty_like(q_THD)
        compressed_attention_kernel[(len(q_THD), -(-heads // HEADS))](
            q_THD, kv, entries, plan.query_start_R1, plan.kv_len_R, table, entry_table, groups_TK,
            sinks_H, out_THD, len(plan.kv_len_R), table.stride(0), entry_table.stride(0),
            kv.stride(0), entries.stride(0), scale, num_warps=4, **constants,
            **launch(q_THD.device),
        )  # fmt: skip
        return out_THD

    return attention


def _supports(problem: CompressedProblem) -> str | None:
    if problem.head_dim > MAX_WIDTH:
        return f"latents of {problem.head_dim} are above {MAX_WIDTH}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
