"""Cascade: a prefix that many decode rows share is read once for all of them, not once a row.

Rows share a prefix if their tables name the same blocks. Three kernels make the lists, once a step
on the device: each row finds its leader, the first row with the same block at PROBE, and how many
blocks they have in common; each leader counts its group and takes what all of it have in common;
and the prefixes are cut into items. An item is a run of positions of one prefix for up to LANES
rows, whose queries make one tile. prefix_kernel makes partial results of the items, and the decode
kernel (triton_decode.py), which starts behind the prefix, adds them to its own (Juravsky et al.
2024, "Hydragen": attention over disjoint positions, combined by their sums and maxima).

A group below MIN_ROWS rows or MIN_BLOCKS blocks shares nothing: its rows are read each for itself.

groups int32 [5, R]: leader (R: none), blocks in common, and of leaders: rows of the group, its
first place among `packed`, tokens shared. packed int32 [R]: rows, group by group. Record r of
`joins` int32 [R, 4] tells row r: tokens shared, its first item, how many items, its lane. `items`
int32 [items at most + 1, 6] begins with how many there are; item i, from 6 (i + 1) on: row whose
table is read, first place among `packed`, rows, first position, position after the last.

R rows, K KV heads, D head_dim, N positions of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_rows import pick
from headrace.back.kernels.attention.triton_softmax import attend_tile
from headrace.back.kernels.triton.grid import enter, enter_late

ITEM_FIELDS = 6
JOIN_FIELDS = 4


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def leaders_kernel(
    starts, lengths, table, groups, num_rows, table_stride,
    PROBE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (R). A row takes part if it has one query and more tokens than the block at PROBE ends
    with."""
    i_row = tl.program_id(0)
    enter(DEPENDENT)
    o_r = tl.arange(0, ROWS)
    m_r = o_r < num_rows
    b_start = tl.load(starts + o_r, mask=m_r, other=0)
    b_queries = tl.load(starts + o_r + 1, mask=m_r, other=0) - b_start
    b_length = tl.load(lengths + o_r, mask=m_r, other=0)
    takes_part = m_r & (b_queries == 1) & (b_length > (PROBE + 1) * BLOCK_TOKENS)
    here = o_r == i_row
    mine = tl.sum((takes_part & here).to(tl.int32), axis=0)
    leader = num_rows
    common = 0
    if mine > 0:
        o_row = o_r.to(tl.int64) * table_stride
        b_probe = tl.load(table + o_row + PROBE, mask=takes_part, other=-1)
        probe = pick(b_probe, here)
        leader = tl.min(tl.where(takes_part & (b_probe == probe), o_r, num_rows), axis=0)
        full = (pick(b_length, here) - 1) // BLOCK_TOKENS
        full = tl.minimum(full, (pick(b_length, o_r == leader) - 1) // BLOCK_TOKENS)
        p_mine = table + i_row.to(tl.int64) * table_stride
        p_other = table + leader.to(tl.int64) * table_stride
        common = full
        for first in range(0, full, CHUNK):
            o_b = first + tl.arange(0, CHUNK)
            b_mine = tl.load(p_mine + o_b, mask=o_b < full, other=0)
            b_other = tl.load(p_other + o_b, mask=o_b < full, other=0)
            common = tl.minimum(common, tl.min(tl.where(b_mine == b_other, full, o_b), axis=0))
    tl.store(groups + i_row, leader)
    tl.store(groups + num_rows + i_row, common)


@triton.jit(do_not_specialize=["num_rows"])
def groups_kernel(
    groups, packed, joins, num_rows,
    MIN_ROWS: tl.constexpr, MIN_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (R). A leader's program writes its group's places; every other row's clears its own
    counts."""
    i_row = tl.program_id(0)
    enter(DEPENDENT)
    o_r = tl.arange(0, ROWS)
    m_r = o_r < num_rows
    b_leader = tl.load(groups + o_r, mask=m_r, other=num_rows)
    b_common = tl.load(groups + num_rows + o_r, mask=m_r, other=0)
    b_ours = m_r & (b_leader == i_row)
    count = tl.sum(b_ours.to(tl.int32), axis=0)
    shared = tl.min(tl.where(b_ours, b_common, 1 << 30), axis=0)
    enough = (count >= MIN_ROWS) & (shared >= MIN_BLOCKS)
    tokens = tl.where(enough, shared * BLOCK_TOKENS, 0)
    base = tl.sum((m_r & (b_leader < i_row)).to(tl.int32), axis=0)
    tl.store(groups + 2 * num_rows + i_row, tl.where(enough, count, 0))
    tl.store(groups + 3 * num_rows + i_row, base)
    tl.store(groups + 4 * num_rows + i_row, tokens)
    b_rank = tl.cumsum(b_ours.to(tl.int32), axis=0) - 1
    tl.store(packed + base + b_rank, o_r, mask=b_ours)
    tl.store(joins + o_r * 4, tl.zeros([ROWS], tl.int32) + tokens, mask=b_ours)
    tl.store(joins + o_r * 4 + 3, b_rank, mask=b_ours)
    if tl.sum(tl.where(o_r == i_row, b_leader, 0), axis=0) == num_rows:
        tl.store(joins + i_row * 4, 0)


@triton.jit(do_not_specialize=["num_rows", "num_items", "wanted"])
def items_kernel(
    groups, joins, items, num_rows, num_items, wanted,
    LANES: tl.constexpr, N: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (the larger of R and `num_items`, the items at most): program i writes item i and
    completes record i."""
    i_one = tl.program_id(0)
    enter(DEPENDENT)
    o_r = tl.arange(0, ROWS)
    m_r = o_r < num_rows
    b_count = tl.load(groups + 2 * num_rows + o_r, mask=m_r, other=0)
    b_tokens = tl.load(groups + 4 * num_rows + o_r, mask=m_r, other=0)
    b_chunks = tl.cdiv(b_count, LANES)
    split = tl.maximum(tl.cdiv(tl.sum(b_chunks * b_tokens, axis=0), wanted), MIN_SPLIT_TOKENS)
    split = tl.cdiv(split, N) * N
    b_splits = tl.cdiv(b_tokens, split)
    b_until = tl.cumsum(b_chunks * b_splits, axis=0)
    if i_one == 0:
        tl.store(items, tl.sum(b_chunks * b_splits, axis=0))
    if i_one < num_items:
        leader = tl.sum((b_until <= i_one).to(tl.int32), axis=0)
        here = o_r == leader
        splits, tokens = pick(b_splits, here), pick(b_tokens, here)
        within = i_one - pick(b_until, here) + pick(b_chunks, here) * splits
        chunk = within // tl.maximum(splits, 1)
        begin = (within - chunk * splits) * split
        base = tl.load(groups + 3 * num_rows + leader, mask=leader < num_rows, other=0)
        rows = tl.minimum(pick(b_count, here) - chunk * LANES, LANES)
        p_item = items + (i_one + 1) * 6
        tl.store(p_item, tl.minimum(leader, num_rows - 1))
        tl.store(p_item + 1, base + chunk * LANES)
        tl.store(p_item + 2, tl.where(leader < num_rows, rows, 0))
        tl.store(p_item + 3, begin)
        tl.store(p_item + 4, tl.minimum(begin + split, tokens))
    if i_one < num_rows:
        here = o_r == tl.load(groups + i_one)
        splits = pick(b_splits, here)
        rank = tl.load(joins + i_one * 4 + 3)
        first = pick(b_until, here) - pick(b_chunks, here) * splits + rank // LANES * splits
        tl.store(joins + i_one * 4 + 1, first)
        tl.store(joins + i_one * 4 + 2, splits)
        tl.store(joins + i_one * 4 + 3, rank % LANES)


@triton.jit(do_not_specialize=["table_stride"])
def prefix_kernel(
    q, kv, scales, table, starts, packed, items, partial, q_token_stride, q_head_stride,
    out_token_stride, block_stride, kind_stride, head_stride, table_stride, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr, BITS: tl.constexpr, NARROW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (any number, K), each program takes item after item; `partial` float32 [items at most,
    K, M, D+2]: sums, maxima, totals. M = LANES * GROUP query-head pairs, padded."""
    enter_late(DEPENDENT)
    for i_item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        _attend(
            i_item, q, kv, scales, table, starts, packed, items, partial, q_token_stride,
            q_head_stride, block_stride, kind_stride, head_stride, table_stride, scale, softcap,
            KV_HEADS, GROUP, M, N, HEAD_DIM, D, BLOCK_TOKENS, SOFTCAP, QUANTIZED, BITS, NARROW,
        )  # fmt: skip


@triton.jit
def _attend(
    i_item, q, kv, scales, table, starts, packed, items, partial, q_token_stride, q_head_stride,
    block_stride, kind_stride, head_stride, table_stride, scale, softcap, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, BITS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """The partial result of one item."""
    i_head = tl.program_id(1)
    p_item = items + (i_item + 1) * 6
    rows = tl.load(p_item + 2)
    i_row = tl.load(p_item).to(tl.int64)
    first = tl.load(p_item + 1)
    begin = tl.load(p_item + 3)
    end = tl.load(p_item + 4)
    p_head = kv + i_head.to(tl.int64) * head_stride
    p_table = table + i_row * table_stride
    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    o_lane = o_m // GROUP
    m_m = o_lane < rows
    m_d = o_d < HEAD_DIM
    b_row = tl.load(packed + first + o_lane, mask=m_m, other=0)
    b_token = tl.load(starts + b_row, mask=m_m, other=0).to(tl.int64)
    p_q = q + b_token * q_token_stride + (i_head * GROUP + o_m % GROUP) * q_head_stride
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, D], tl.float32)
    for start in range(begin, end, N):
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, start, end, b_token, p_table, p_head, scales, i_head,
            block_stride, kind_stride, head_stride, scale, softcap, N, HEAD_DIM, D, BLOCK_TOKENS, 0,
            SOFTCAP, QUANTIZED, BITS, False, b_sum, False, True, NARROW,
        )  # fmt: skip
    p_mine = partial + (i_item * KV_HEADS + i_head).to(tl.int64) * (M * (D + 2))
    tl.store(p_mine + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None])
    tl.store(p_mine + M * D + o_m, b_max, mask=m_m)
    tl.store(p_mine + M * D + M + o_m, b_sum, mask=m_m)
