"""Attention of rows with few queries: memory-bound, so the KV cache is cut into splits of equal
size over all rows.

A split is a run of positions of one row, one KV head at a time; all query heads that read it share
its loads (M = 16 or more query-head pairs, padded). The size of a split follows from all lengths
together, so that there are about as many splits as the device takes at once, whatever the mix of
lengths; at least MIN_SPLIT_TOKENS positions, so that short rows are one split and need no
combination. The list of splits is made on the device, once a step for all layers that share a plan.
The program that finishes a row's last split combines them, in their order (split-KV: Dao et al.
2023, "Flash-Decoding").

H query heads, K KV heads, D head_dim, N positions of a tile, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.attention.triton_rows import pick, row_spans
from headrace.back.kernels.attention.triton_softmax import (
    attend_tile,
    divisor,
    split_weights,
    store_lse,
)
from headrace.back.kernels.triton.grid import enter

SPLIT_FIELDS = 12
"""int32 values of a split: row, first position, end, the row's first split and number of splits (0:
no work), KV length, query tokens, first query token; and where there may be shared prefixes, the
row's first item, how many items, and its lane (triton_cascade.py)."""


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def splits_kernel(
    starts, lengths, joins, splits, num_rows, num_splits,
    MAX_QUERIES: tl.constexpr, MIN_QUERIES: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (splits at most). `num_splits`: splits wanted over all rows; `splits` int32 [splits at
    most, 12]. If SHARED, rows begin behind their prefixes (`joins`: triton_cascade.py)."""
    i_split = tl.program_id(0)
    enter(DEPENDENT)
    o_r, b_queries, b_length, b_first = row_spans(starts, lengths, num_rows, WINDOW, ROWS)
    if SHARED:
        b_first = tl.load(joins + o_r * 4, mask=o_r < num_rows, other=0)
    ours = (b_queries >= MIN_QUERIES) & (b_queries <= MAX_QUERIES)
    b_seen = tl.where(ours, b_length - b_first, 0)
    split = tl.maximum(tl.cdiv(tl.sum(b_seen, axis=0), num_splits), MIN_SPLIT_TOKENS)
    split = tl.cdiv(split, N) * N
    b_splits = tl.cdiv(b_seen, split)
    if not CAUSAL:  # a row without KV has results too
        b_splits = tl.where(ours, tl.maximum(b_splits, 1), 0)
    b_until = tl.cumsum(b_splits, axis=0)
    i_row = tl.sum((b_until <= i_split).to(tl.int32), axis=0)
    here = o_r == i_row
    count = pick(b_splits, here)
    first = pick(b_until, here) - count
    length = pick(b_length, here)
    begin = pick(b_first, here) + (i_split - first) * split
    i_row = tl.minimum(i_row, num_rows - 1)
    p_split = splits + i_split * 12
    tl.store(p_split, i_row)
    tl.store(p_split + 1, begin)
    tl.store(p_split + 2, tl.minimum(begin + split, length))
    tl.store(p_split + 3, first)
    tl.store(p_split + 4, count)
    tl.store(p_split + 5, length)
    tl.store(p_split + 6, pick(b_queries, here))
    tl.store(p_split + 7, tl.load(starts + i_row))
    if SHARED:
        tl.store(p_split + 8, tl.load(joins + i_row * 4 + 1))
        tl.store(p_split + 9, tl.load(joins + i_row * 4 + 2))
        tl.store(p_split + 10, tl.load(joins + i_row * 4 + 3))


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q, kv, scales, sinks, slopes, out, lse, table, splits, partial, prefix, counters, q_token_stride,
    q_head_stride, out_token_stride, block_stride, kind_stride, head_stride, table_stride, scale,
    softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MERGED: tl.constexpr, MERGED_M: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, BITS: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr,
    NARROW: tl.constexpr, COMBINED: tl.constexpr,
    SHARED: tl.constexpr, PREFIX_M: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (K, splits at most): heads of a split run beside each other, since they lie beside each
    other in a block; `partial` float32 [splits at most, K, M, D+2]; `lse` float32 [T, H], if LSE.
    MERGED: queries of a row whose splits are merged at once, with their heads MERGED_M rows. What
    is read before the wait was written before the kernel that this one waits for (enter_late)."""
    i_split = tl.program_id(1)
    i_head = tl.program_id(0)
    p_split = splits + i_split * 12
    i_row = tl.load(p_split)
    begin = tl.load(p_split + 1)
    end = tl.load(p_split + 2)
    first_split = tl.load(p_split + 3)
    num_splits = tl.load(p_split + 4)
    length = tl.load(p_split + 5)
    queries = tl.load(p_split + 6)
    first_token = tl.load(p_split + 7).to(tl.int64)
    prefix_splits, lane = 0, 0
    if SHARED:
        first_item = tl.load(p_split + 8)
        prefix_splits = tl.load(p_split + 9)
        lane = tl.load(p_split + 10)
    p_head = kv + i_head.to(tl.int64) * head_stride
    p_table = table + i_row.to(tl.int64) * table_stride
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if num_splits == 0:
        return

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    m_m = o_m < queries * GROUP
    o_token = first_token + o_m // GROUP
    o_query_head = i_head * GROUP + o_m % GROUP
    p_q = q + o_token * q_token_stride + o_query_head * q_head_stride
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
    b_position = length - queries + o_m // GROUP

    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, D], tl.float32)
    if SINKS:  # noqa: SIM102 (known when it is compiled, unlike the other)
        if i_split == first_split:
            b_max = tl.load(sinks + o_query_head, mask=m_m, other=0.0) * 1.4426950408889634
            b_sum = b_sum + 1.0
    b_slope = b_sum
    if ALIBI:
        b_slope = tl.load(slopes + o_query_head, mask=m_m, other=0.0)
    for start in range(begin, end, N):
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, start, end, b_position, p_table, p_head, scales, i_head,
            block_stride, kind_stride, head_stride, scale, softcap, N, HEAD_DIM, D, BLOCK_TOKENS,
            WINDOW, SOFTCAP, QUANTIZED, BITS, True, b_slope, ALIBI, CAUSAL, NARROW,
        )  # fmt: skip

    if num_splits == 1 and prefix_splits == 0:
        p_out = out + o_token * out_token_stride + o_query_head * HEAD_DIM
        b_out = (b_acc / divisor(b_sum, CAUSAL)[:, None]).to(out.dtype.element_ty)
        tl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])
        if LSE:
            store_lse(lse + o_token * (KV_HEADS * GROUP) + o_query_head, b_max, b_sum, m_m)
        return
    STEP: tl.constexpr = KV_HEADS * M * (D + 2)
    p_mine = partial + (i_split * KV_HEADS + i_head).to(tl.int64) * (M * (D + 2))
    tl.store(p_mine + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None])
    tl.store(p_mine + M * D + o_m, b_max, mask=m_m)
    tl.store(p_mine + M * D + M + o_m, b_sum, mask=m_m)
    tl.debug_barrier()
    p_counter = counters + i_row * KV_HEADS + i_head
    if tl.atomic_add(p_counter, 1, sem="acq_rel") == num_splits - 1:
        tl.store(p_counter, 0)
        p_row = partial + (first_split * KV_HEADS + i_head).to(tl.int64) * (M * (D + 2))
        p_prefix = prefix
        if SHARED:
            p_prefix = prefix + (first_item * KV_HEADS + i_head).to(tl.int64) * (PREFIX_M * (D + 2))
        o_g = tl.arange(0, MERGED_M)
        for i_query in range(0, queries, MERGED):
            m_g = (o_g < MERGED * GROUP) & (i_query + o_g // GROUP < queries)
            b_all, b_highest, b_total = _result(
                p_row, i_query * GROUP + o_g, m_g, num_splits, p_prefix, lane * GROUP + o_g,
                prefix_splits, M, D, STEP, COMBINED, SHARED, PREFIX_M, KV_HEADS,
            )  # fmt: skip
            b_out = b_all / divisor(b_total, CAUSAL)[:, None]
            o_out = first_token + i_query + o_g // GROUP
            o_out_head = i_head * GROUP + o_g % GROUP
            p_out = out + o_out * out_token_stride + o_out_head * HEAD_DIM
            m_out = m_g[:, None] & m_d[None, :]
            p_out = p_out[:, None] + o_d[None, :]
            tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
            if LSE:
                p_lse = lse + o_out * (KV_HEADS * GROUP) + o_out_head
                store_lse(p_lse, b_highest, b_total, m_g)


@triton.jit
def _result(
    p_row, o_m, m_m, num_splits, p_prefix, o_lane, prefix_splits, M: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, COMBINED: tl.constexpr, SHARED: tl.constexpr, PREFIX_M: tl.constexpr,
    KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Sums [rows, D], maxima and totals of rows `o_m` of a tile from all its splits, and from those
    of its prefix, in whose tile they are rows `o_lane`."""
    b_total = tl.zeros(o_m.shape, tl.float32)
    b_highest = tl.full(o_m.shape, float("-inf"), tl.float32)
    b_all = tl.zeros([o_m.shape[0], D], tl.float32)
    b_all, b_total, b_highest = _combined(
        b_all, b_total, b_highest, p_row, o_m, m_m, num_splits, M, D, STEP, COMBINED
    )
    if SHARED:
        b_all, b_total, b_highest = _combined(
            b_all, b_total, b_highest, p_prefix, o_lane, m_m, prefix_splits, PREFIX_M, D,
            KV_HEADS * PREFIX_M * (D + 2), COMBINED,
        )  # fmt: skip
    return b_all, b_highest, b_total


@triton.jit
def _combined(
    b_acc, b_total, b_highest, p_row, o_m, m_m, num_splits, M: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """Adds the rows' splits, COMBINED at a time, to their sums [rows, D], totals and maxima."""
    o_d = tl.arange(0, D)
    for first in range(0, num_splits, COMBINED):
        o_s = first + tl.arange(0, COMBINED)
        m_s = (o_s < num_splits)[:, None] & m_m[None, :]
        p_s = p_row + o_s.to(tl.int64)[:, None] * STEP + o_m[None, :]
        b_max = tl.load(p_s + M * D, mask=m_s, other=float("-inf"), cache_modifier=".cg")
        b_sum = tl.load(p_s + M * D + M, mask=m_s, other=0.0, cache_modifier=".cg")
        p_part = p_row + o_s.to(tl.int64)[:, None, None] * STEP
        p_part = p_part + o_m[None, :, None] * D + o_d[None, None, :]
        b_part = tl.load(p_part, mask=m_s[:, :, None], other=0.0, cache_modifier=".cg")
        b_weight, b_shrink, b_highest = split_weights(b_highest, b_max, True)
        b_total = b_total * b_shrink + tl.sum(b_weight * b_sum, axis=0)
        b_acc = b_acc * b_shrink[:, None] + tl.sum(b_part * b_weight[:, :, None], axis=0)
    return b_acc, b_total, b_highest
