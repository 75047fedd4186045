"""The entries of groups in Triton: a program takes a token and makes the entry of the group whose
last one it is, one pass over the group's tokens with a softmax for each element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.group_write.op import GroupWrite, GroupWriteProblem
from headrace.back.kernels.index_select.triton_index_select import place_of
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

MAX_WIDTH = 1024


@triton.jit
def _pooled(
    p_tokens, p_blocks, bias, o_e, m_e, end, token_stride, WIDTH: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, SERIES: tl.constexpr, GATED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Elements o_e of the entry of the group that ends before position `end`: of the group before
    the first series is read, of its own the last."""
    ALL: tl.constexpr = SERIES * WIDTH
    b_best = tl.full([D], float("-inf"), tl.float32)
    b_total = tl.zeros([D], tl.float32)
    b_values = tl.zeros([D], tl.float32)
    for s in range(tl.maximum(SERIES * GROUP - end, 0), SERIES * GROUP):
        at = end - SERIES * GROUP + s
        block = tl.load(p_blocks + at // BLOCK_TOKENS).to(tl.int64)
        p_token = p_tokens + block * token_stride + at % BLOCK_TOKENS * (ALL * (2 if GATED else 1))
        o_x = s // GROUP * WIDTH + o_e
        b_value = tl.load(p_token + o_x, mask=m_e, other=0.0).to(tl.float32)
        if GATED:
            b_gate = tl.load(p_token + ALL + o_x, mask=m_e, other=0.0).to(tl.float32)
            b_gate += tl.load(bias + s % GROUP * ALL + o_x, mask=m_e, other=0.0)
            b_higher = tl.maximum(b_best, b_gate)
            b_shrink, b_share = tl.exp(b_best - b_higher), tl.exp(b_gate - b_higher)
            b_total = b_total * b_shrink + b_share
            b_values = b_values * b_shrink + b_share * b_value
            b_best = b_higher
        else:
            b_total += 1.0
            b_values += b_value
    return b_values / b_total


@triton.jit
def group_write_kernel(
    tokens, entries, angles, bias, weight, start, length, table, entry_table, rows, table_stride,
    entry_table_stride, token_stride, entry_stride, eps, WIDTH: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SERIES: tl.constexpr, GATED: tl.constexpr,
    NORMED: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. D: WIDTH, padded; SIZE: positions that a block of entries stands for."""
    enter_late(DEPENDENT)
    i_row, position = place_of(start, length, rows, tl.program_id(0))
    end = position + 1
    if (position < 0) | (end % GROUP != 0):
        return
    p_blocks = table + i_row.to(tl.int64) * table_stride
    o_e = tl.arange(0, D)
    m_e = o_e < WIDTH
    b_x = _pooled(
        tokens, p_blocks, bias, o_e, m_e, end, token_stride, WIDTH, D, GROUP, SERIES, GATED,
        BLOCK_TOKENS,
    )  # fmt: skip
    b_x = tl.where(m_e, b_x, 0.0)
    factor = 1.0
    if NORMED:
        factor = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
        b_x = b_x * factor * tl.load(weight + o_e, mask=m_e, other=0.0)
    i_group = end // GROUP - 1
    if ROTARY:
        HALF: tl.constexpr = ROTARY // 2
        o_r = o_e - OFFSET
        m_r = (o_r >= 0) & (o_r < ROTARY)
        o_r = tl.where(m_r, o_r, 0)
        if PAIRS:
            is_second, o_angle, o_other = o_r % 2 == 1, o_r // 2, o_r ^ 1
        else:
            is_second, o_angle, o_other = o_r >= HALF, o_r % HALF, (o_r + HALF) % ROTARY
        b_y = _pooled(
            tokens, p_blocks, bias, OFFSET + o_other, m_r, end, token_stride, WIDTH, D, GROUP,
            SERIES, GATED, BLOCK_TOKENS,
        )  # fmt: skip
        if NORMED:
            b_y = b_y * factor * tl.load(weight + OFFSET + o_other, mask=m_r, other=0.0)
        p_angle = angles + (i_group * GROUP).to(tl.int64) * ROTARY + o_angle
        b_cos = tl.load(p_angle, mask=m_r, other=0.0)
        b_sin = tl.load(p_angle + HALF, mask=m_r, other=0.0)
        b_turned = b_x * b_cos + tl.where(is_second, b_y, -b_y) * b_sin
        b_x = tl.where(m_r, b_turned, b_x)
    o_last = (i_group + 1) * GROUP - 1
    p_block = entry_table + i_row.to(tl.int64) * entry_table_stride + o_last // SIZE
    p_entry = entries + tl.load(p_block).to(tl.int64) * entry_stride
    p_entry += o_last % SIZE // GROUP * WIDTH
    tl.store(p_entry + o_e, b_x.to(entries.dtype.element_ty), mask=m_e)


def bind(
    problem: GroupWriteProblem, bias_GX: torch.Tensor | None, weight_I: torch.Tensor | None
) -> GroupWrite:
    """The kernel of one shape; keeps the bias and the weight."""
    assert (weight_I is not None) == (problem.eps is not None), problem
    assert (bias_GX is not None) == problem.gated, problem
    width, group, rotary = problem.width, problem.group, problem.rotary
    bias_GX, weight_I = (
        None if one is None else one.float().contiguous() for one in (bias_GX, weight_I)
    )
    constants = {
        "WIDTH": width, "D": power_of_two(width), "GROUP": group,
        "SIZE": max(problem.block_tokens, group), "SERIES": problem.series, "GATED": problem.gated,
        "NORMED": problem.eps is not None, "ROTARY": rotary, "OFFSET": problem.offset,
        "PAIRS": problem.layout == "pairs", "BLOCK_TOKENS": problem.block_tokens,
    }  # fmt: skip

    def group_write(
        tokens: torch.Tensor,
        entries: torch.Tensor,
        table_PR: torch.Tensor,
        plan: Plan,
        entry_plan: Plan,
    ) -> None:
        assert tokens.stride()[1:] == (problem.token_width, 1), tokens.stride()
        assert entries.stride()[1:] == (width, 1), entries.stride()
        assert not rotary or (table_PR.is_contiguous() and table_PR.shape[1] == rotary)
        table, entry_table = plan.block_table_RB, entry_plan.block_table_RB
        group_write_kernel[(len(plan.slot_T),)](
            tokens, entries, table_PR if rotary else tokens, tokens if bias_GX is None else bias_GX,
            tokens if weight_I is None else weight_I, plan.query_start_R1, plan.kv_len_R, table,
            entry_table, len(plan.kv_len_R), table.stride(0), entry_table.stride(0),
            tokens.stride(0), entries.stride(0), problem.eps or 0.0, num_warps=4, **constants,
            **launch(tokens.device),
        )  # fmt: skip

    return group_write


def _supports(problem: GroupWriteProblem) -> str | None:
    if problem.width > MAX_WIDTH:
        return f"entries of {problem.width} are above {MAX_WIDTH}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
