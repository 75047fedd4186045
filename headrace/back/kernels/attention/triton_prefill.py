"""Attention of rows with many queries: bound by arithmetic, so tiles are large and products go
through tl.dot.

A tile is M query-head pairs: M // GROUP successive queries of one row, with all query heads of one
KV head. Tiles of a row are taken from its end, since later queries see more. Positions that every
query of the tile sees are taken without masks. One pass with a running maximum (Dao 2023,
"FlashAttention-2").

H query heads, K KV heads, D head_dim, N positions of a tile, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_narrow import narrow_pointers, narrow_values
from headrace.back.kernels.attention.triton_quantized import dequantized, scale_pointers
from headrace.back.kernels.attention.triton_rows import (
    alibi,
    capped,
    first_seen,
    pick,
    row_spans,
)
from headrace.back.kernels.attention.triton_softmax import (
    LOG2E,
    divisor,
    softmax_weights,
    store_lse,
)
from headrace.back.kernels.triton.grid import enter


@triton.jit
def _step(
    b_acc, b_max, b_sum, b_q, p_table, p_head, scales, i_head, start, lowest, end, b_position,
    scale, softcap, block_stride, kind_stride, head_stride, N: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr, b_slope, ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Takes positions start .. start + N into the running result; below `lowest` and from `end` on
    nothing is read."""
    o_n = start + tl.arange(0, N)
    o_d = tl.arange(0, D)
    if MASKED:
        m_n = (o_n >= lowest) & (o_n < end)
        b_block = tl.load(p_table + o_n // BLOCK_TOKENS, mask=m_n, other=0).to(tl.int64)
    else:
        b_block = tl.load(p_table + o_n // BLOCK_TOKENS).to(tl.int64)
    p_k = p_head + (b_block * block_stride + o_n % BLOCK_TOKENS * HEAD_DIM)[:, None] + o_d[None, :]
    if NARROW is not None:
        if not MASKED:
            m_n = o_n >= 0
        p_n, p_slot = narrow_pointers(
            p_head, scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS, NARROW,
            HEAD_DIM,
        )  # fmt: skip
        b_k = narrow_values(p_n, p_slot, m_n, b_q.dtype, NARROW, HEAD_DIM)
    elif MASKED:
        m_kv = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
        b_k = tl.load(p_k, mask=m_kv, other=0.0)
    elif HEAD_DIM != D:
        b_k = tl.load(p_k, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
    else:
        b_k = tl.load(p_k)
    if QUANTIZED:
        p_scale = scale_pointers(
            scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS, HEAD_DIM
        )
        b_k = dequantized(b_k, b_q.dtype, True, BITS)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if QUANTIZED:
        if MASKED:
            b_s = b_s * tl.load(p_scale, mask=m_n, other=0.0)[None, :]
        else:
            b_s = b_s * tl.load(p_scale)[None, :]
    if SOFTCAP:
        b_s = capped(b_s * scale, softcap, SOFTCAP)
        factor = LOG2E
    elif ALIBI:
        b_s = b_s * scale
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if ALIBI:
        b_s = b_s + alibi(b_slope, o_n, b_position)
    if MASKED:
        seen = m_n[None, :]
        if CAUSAL:
            seen = seen & (o_n[None, :] <= b_position[:, None])
        if WINDOW:
            seen = seen & (o_n[None, :] >= first_seen(b_position, WINDOW)[:, None])
        b_s = tl.where(seen, b_s, float("-inf"))
    b_p, b_shrink, b_higher = softmax_weights(b_s, b_max, factor, MASKED)
    b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_shrink[:, None]
    p_v = p_k + kind_stride
    if NARROW is not None:
        b_v = narrow_values(
            p_n + kind_stride, p_slot + kind_stride // 4, m_n, b_q.dtype, NARROW, HEAD_DIM
        )
    elif MASKED:
        b_v = tl.load(p_v, mask=m_kv, other=0.0)
    elif HEAD_DIM != D:
        b_v = tl.load(p_v, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
    else:
        b_v = tl.load(p_v)
    if QUANTIZED:
        b_v = dequantized(b_v, b_q.dtype, False, BITS)
        p_scale = p_scale + kind_stride // 4
        if MASKED:
            b_p = b_p * tl.load(p_scale, mask=m_n, other=0.0)[None, :]
        else:
            b_p = b_p * tl.load(p_scale)[None, :]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_higher, b_sum


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def prefill_kernel(
    q, kv, scales, sinks, slopes, out, lse, starts, lengths, table, num_rows, q_token_stride, q_head_stride,
    out_token_stride, block_stride, kind_stride, head_stride, table_stride, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MIN_QUERIES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
    BITS: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, CAUSAL: tl.constexpr,
    LSE: tl.constexpr, NARROW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (K, tiles at most). Rows with fewer than MIN_QUERIES queries are the decode kernel's.
    `lse` float32 [T, H], if LSE."""
    i_head = tl.program_id(0)
    i_tile = tl.program_id(1)
    enter(DEPENDENT)
    QUERIES: tl.constexpr = M // GROUP
    o_r, b_queries, b_length, _ = row_spans(starts, lengths, num_rows, WINDOW, ROWS)
    b_tiles = tl.where(b_queries >= MIN_QUERIES, tl.cdiv(b_queries, QUERIES), 0)
    b_until = tl.cumsum(b_tiles, axis=0)
    if i_tile >= tl.sum(b_tiles, axis=0):
        return
    i_row = tl.sum((b_until <= i_tile).to(tl.int32), axis=0)
    here = o_r == i_row
    length, queries = pick(b_length, here), pick(b_queries, here)
    first_query = (pick(b_until, here) - 1 - i_tile) * QUERIES

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    o_query = first_query + o_m // GROUP
    m_m = (o_m < QUERIES * GROUP) & (o_query < queries)
    m_q = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    o_token = tl.load(starts + i_row).to(tl.int64) + o_query
    o_query_head = i_head * GROUP + o_m % GROUP
    p_q = (
        q + o_token[:, None] * q_token_stride + o_query_head[:, None] * q_head_stride + o_d[None, :]
    )
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_position = tl.minimum(length - queries + o_query, length - 1)
    lowest_position = length - queries + first_query
    end = tl.minimum(lowest_position + QUERIES, length)
    if not CAUSAL:
        end = length

    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, D], tl.float32)
    if SINKS:
        b_max = tl.load(sinks + o_query_head, mask=m_m, other=0.0) * 1.4426950408889634
        b_sum = b_sum + 1.0
    b_slope = b_sum
    if ALIBI:
        b_slope = tl.load(slopes + o_query_head, mask=m_m, other=0.0)
    p_head = kv + i_head.to(tl.int64) * head_stride
    p_table = table + i_row.to(tl.int64) * table_stride
    lowest = 0
    if WINDOW:
        lowest = first_seen(lowest_position, WINDOW)
        unmasked = lowest // N * N
    else:
        unmasked = (lowest_position + 1) // N * N
        if not CAUSAL:
            unmasked = length // N * N
        for start in range(0, unmasked, N):
            b_acc, b_max, b_sum = _step(
                b_acc, b_max, b_sum, b_q, p_table, p_head, scales, i_head, start, lowest, end,
                b_position, scale, softcap, block_stride, kind_stride, head_stride, N, HEAD_DIM, D,
                BLOCK_TOKENS, WINDOW, SOFTCAP, QUANTIZED, BITS, False, b_slope, ALIBI, CAUSAL, NARROW,
            )  # fmt: skip
    for start in range(unmasked, end, N):
        b_acc, b_max, b_sum = _step(
            b_acc, b_max, b_sum, b_q, p_table, p_head, scales, i_head, start, lowest, end,
            b_position, scale, softcap, block_stride, kind_stride, head_stride, N, HEAD_DIM, D,
            BLOCK_TOKENS, WINDOW, SOFTCAP, QUANTIZED, BITS, True, b_slope, ALIBI, CAUSAL, NARROW,
        )  # fmt: skip
    b_out = (b_acc / divisor(b_sum, CAUSAL)[:, None]).to(out.dtype.element_ty)
    p_out = (
        out + o_token[:, None] * out_token_stride + o_query_head[:, None] * HEAD_DIM + o_d[None, :]
    )
    tl.store(p_out, b_out, mask=m_q)
    if LSE:
        store_lse(lse + o_token * (KV_HEADS * GROUP) + o_query_head, b_max, b_sum, m_m)
