"""Groups chosen by an indexer's scores in Triton: those of entries as positions are
(triton_index_select.py), those of best keys by a kernel of their own before the same select."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.group_select.op import GroupSelect, GroupSelectProblem
from headrace.back.kernels.index_select.triton_index_select import (
    HEADS,
    MAX_DIM,
    EntrySelect,
    parts_of,
    score_bits,
)
from headrace.back.kernels.index_select.triton_select import READ, place_of, select_kernel
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

MAX_GROUP = 128
"""Positions of a group whose best key is looked for: those of a tile."""


@triton.jit
def best_key_kernel(
    q, keys, start, length, table, scores, rows, first_token, q_token, table_stride, block_stride,
    score_stride, HEADS: tl.constexpr, J: tl.constexpr, DIM: tl.constexpr, I: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOP_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, groups. G: GROUP, padded."""
    enter_late(DEPENDENT)
    i_s, i_g = tl.program_id(0), tl.program_id(1)
    i_t = i_s + first_token
    i_row, position = place_of(start, length, rows, i_t)
    seen = (position + GROUP) // GROUP
    if (seen <= TOP_K) | (i_g >= seen):
        return
    o_g, o_i, o_j = tl.arange(0, G), tl.arange(0, I), tl.arange(0, J)
    o_s = i_g * GROUP + o_g
    m_s, m_i = (o_g < GROUP) & (o_s <= position), (o_i < DIM)[None, :]
    p_block = table + i_row.to(tl.int64) * table_stride + o_s // BLOCK_TOKENS
    b_block = tl.load(p_block, mask=m_s, other=0).to(tl.int64)
    p_k = keys + (b_block * block_stride + o_s % BLOCK_TOKENS * DIM)[:, None] + o_i[None, :]
    b_k = tl.load(p_k, mask=m_s[:, None] & m_i, other=0.0)
    for first in range(0, HEADS, J):
        m_j = first + o_j < HEADS
        p_q = q + i_t.to(tl.int64) * q_token + (first + o_j)[:, None] * DIM + o_i[None, :]
        b_q = tl.load(p_q, mask=m_j[:, None] & m_i, other=0.0)
        b_bits = score_bits(tl.dot(b_k, tl.trans(b_q), input_precision="ieee"))
        b_bits = tl.where(m_s[:, None], b_bits, -2147483648)
        p_score = scores + (i_s.to(tl.int64) * HEADS + first + o_j) * score_stride + i_g
        tl.store(p_score, tl.max(b_bits, axis=0), mask=m_j)


def bind(problem: GroupSelectProblem) -> GroupSelect:
    """The kernels of one shape."""
    return _bind_best_keys(problem) if problem.best_key else _bind_entries(problem)


def _bind_entries(problem: GroupSelectProblem) -> GroupSelect:
    select = EntrySelect(
        heads=problem.heads,
        dim=problem.dim,
        top_k=problem.top_k,
        group=problem.group,
        block_tokens=problem.block_tokens,
    )

    def group_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, entries: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        shape = (len(q_TJI), 1, problem.top_k)
        chosen_T1K = torch.empty(shape, dtype=torch.int32, device=q_TJI.device)
        select(q_TJI, weight_TJ, entries, plan, chosen_T1K)
        return chosen_T1K

    return group_select


def _bind_best_keys(problem: GroupSelectProblem) -> GroupSelect:
    heads, dim, top_k, group = problem.heads, problem.dim, problem.top_k, problem.group
    of_scores = {
        "HEADS": heads, "J": HEADS, "DIM": dim, "I": max(16, power_of_two(dim)), "GROUP": group,
        "G": max(16, power_of_two(group)), "BLOCK_TOKENS": problem.block_tokens, "TOP_K": top_k,
    }  # fmt: skip
    of_select = {
        "LISTS": heads, "TOP_K": top_k, "GROUP": group, "BEGUN": True, "LOCAL": problem.local,
        "N": READ,
    }  # fmt: skip

    def group_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        assert q_TJI.shape[1:] == (heads, dim) and q_TJI.stride()[1:] == (dim, 1), q_TJI.stride()
        assert keys.stride()[1:] == (dim, 1), keys.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        shape = (len(q_TJI), heads, top_k)
        chosen_TGK = torch.empty(shape, dtype=torch.int32, device=q_TJI.device)
        groups = triton.cdiv(plan.max_kv_len, group)
        for first, count in parts_of(len(q_TJI), heads * groups):
            scores = torch.empty((count, heads, groups), dtype=torch.int32, device=q_TJI.device)
            best_key_kernel[(count, groups)](
                q_TJI, keys, starts, lengths, table, scores, len(lengths), first, q_TJI.stride(0),
                table.stride(0), keys.stride(0), groups, num_warps=4, **of_scores,
                **launch(q_TJI.device),
            )  # fmt: skip
            select_kernel[(count, heads)](
                scores, chosen_TGK, starts, lengths, len(lengths), first, groups, num_warps=8,
                **of_select, **launch(q_TJI.device),
            )  # fmt: skip
        return chosen_TGK

    return group_select


def _supports(problem: GroupSelectProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    if problem.best_key and problem.group > MAX_GROUP:
        return f"groups of {problem.group} keys are above {MAX_GROUP}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
