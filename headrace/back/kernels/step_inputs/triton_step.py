"""The step's inputs in two launches: block updates, then one program per 128 query tokens and one
per row.

Every program reads how much is real from the message and ends early if nothing of its part is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import (
    HEADER,
    StepInputs,
    StepInputsProblem,
    StepOut,
    StepTables,
)

TILE = 128


@triton.jit
def _update_kernel(words, blocks, UPDATES_AT: tl.constexpr, TILE: tl.constexpr):
    num_updates = tl.load(words + 3)
    o_u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_u = o_u < num_updates
    p_pair = words + UPDATES_AT + 2 * o_u
    b_at = tl.load(p_pair, mask=m_u, other=0)
    tl.store(blocks + b_at, tl.load(p_pair + 1, mask=m_u, other=0), mask=m_u)


@triton.jit(do_not_specialize=["T", "R"])
def _build_kernel(
    words,
    tokens,
    blocks,
    token_ids,
    positions,
    slots,
    tables,
    last,
    length,
    cross,
    kv_len,
    lengths,
    T,
    R,
    C,
    B,
    M1,
    BLOCK_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    HEADER: tl.constexpr,
    SEARCH: tl.constexpr,
    LENGTHS: tl.constexpr,
    SPANS: tl.constexpr,
    EACH: tl.constexpr,
    CROSS: tl.constexpr,
    TILE: tl.constexpr,
):
    """BLOCK_TOKENS, SPANS: of each group (GroupBlocks). EACH: `lengths` of the rows in each group
    are written. CROSS: `cross` says how many tokens the cross caches of each row hold."""
    i_p = tl.program_id(0)
    num_tiles = tl.cdiv(T, TILE)
    p_row = words + HEADER
    p_len = words + HEADER + P
    p_start = words + HEADER + 2 * P
    if i_p < num_tiles:
        num_tokens = tl.load(words + 1)
        o_t = i_p * TILE + tl.arange(0, TILE)
        m_t = o_t < T
        m_real = o_t < num_tokens
        low = tl.zeros([TILE], tl.int32)
        high = tl.zeros([TILE], tl.int32) + R - 1
        for _ in range(SEARCH):
            mid = (low + high) // 2
            beyond = tl.load(p_start + mid + 1) <= o_t
            low = tl.where(beyond & (low < high), mid + 1, low)
            high = tl.where(beyond, high, mid)
        b_row = tl.load(p_row + low).to(tl.int64)
        b_pos = tl.load(p_len + low) - tl.load(p_start + low + 1) + o_t
        if LENGTHS:
            b_newest = tl.load(length + b_row) - 1 - tl.load(p_start + low)
            b_pos = tl.minimum(b_pos, b_newest + o_t)
        b_pos = tl.where(m_real, b_pos, 0)
        b_id = tl.load(tokens + b_row * C + b_pos, mask=m_real, other=0)
        tl.store(token_ids + o_t, b_id.to(tl.int64), mask=m_t)
        tl.store(positions + o_t, b_pos.to(tl.int64), mask=m_t)
        for g in tl.static_range(GROUPS):
            m_slot = m_real & (SPANS[g] == 0)
            b_index = b_pos // BLOCK_TOKENS[g]
            b_offset = b_pos - b_index * BLOCK_TOKENS[g]
            b_block = tl.load(blocks + (g * M1 + b_row) * B + b_index, mask=m_slot, other=0)
            b_slot = tl.where(m_slot, b_block.to(tl.int64) * BLOCK_TOKENS[g] + b_offset, 0)
            tl.store(slots + g * T + o_t, b_slot, mask=m_t)
    else:
        i_r = i_p - num_tiles
        row = tl.load(p_row + i_r).to(tl.int64)
        tl.store(last + i_r, tl.maximum(tl.load(p_start + i_r + 1) - 1, 0).to(tl.int64))
        kv_tokens = tl.load(p_len + i_r)
        if LENGTHS:
            num = tl.load(p_start + i_r + 1) - tl.load(p_start + i_r)
            first = tl.minimum(kv_tokens - num, tl.load(length + row) - 1)
            kv_tokens = tl.where(num > 0, first + num, 0)
            tl.store(kv_len + i_r, kv_tokens)
        for g in tl.static_range(GROUPS):
            here = kv_tokens
            if SPANS[g] > 0:
                held = SPANS[g]
                if CROSS:
                    held = tl.minimum(tl.load(cross + row), held)
                here = tl.where(kv_tokens > 0, held, 0)
            if EACH:
                tl.store(lengths + g * R + i_r, here)
            count = tl.cdiv(here, BLOCK_TOKENS[g])
            p_from = blocks + (g * M1 + row) * B
            p_to = tables + (g * R + i_r).to(tl.int64) * B
            for begin in range(0, count, TILE):
                o_b = begin + tl.arange(0, TILE)
                tl.store(p_to + o_b, tl.load(p_from + o_b, mask=o_b < count), mask=o_b < count)


def bind(problem: StepInputsProblem) -> StepInputs:
    """Grids follow from the bucket alone."""

    def step_inputs(words: torch.Tensor, tables: StepTables, out: StepOut) -> None:
        tokens_MC, blocks_GMB = tables.tokens_MC, tables.blocks_GMB
        num_groups, num_rows, columns = blocks_GMB.shape
        num_tokens, rows = out.token_ids_T.shape[0], out.last_R.shape[0]
        groups = problem.groups_of(num_groups)
        _update_kernel[(triton.cdiv(out.updates, TILE),)](
            words, blocks_GMB, UPDATES_AT=problem.updates_at, TILE=TILE
        )
        _build_kernel[(triton.cdiv(num_tokens, TILE) + rows,)](
            words,
            tokens_MC,
            blocks_GMB,
            out.token_ids_T,
            out.positions_T,
            out.slots_GT,
            out.tables_GRB,
            out.last_R,
            words if tables.length_M is None else tables.length_M,
            words if tables.cross_M is None else tables.cross_M,
            words if out.kv_len_R is None else out.kv_len_R,
            words if out.lengths_GR is None else out.lengths_GR,
            num_tokens,
            rows,
            tokens_MC.shape[1],
            columns,
            num_rows,
            BLOCK_TOKENS=tuple(group.tokens for group in groups),
            SPANS=tuple(group.span for group in groups),
            EACH=out.lengths_GR is not None,
            CROSS=tables.cross_M is not None,
            GROUPS=num_groups,
            P=problem.section,
            HEADER=HEADER,
            SEARCH=max(1, (problem.max_rows + 1).bit_length()),
            LENGTHS=tables.length_M is not None,
            TILE=TILE,
        )

    return step_inputs


def _supports(problem: StepInputsProblem) -> str | None:
    return None if problem.device == "cuda" else "runs on CUDA devices only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
