"""Attention of rows with few queries: memory-bound, so the KV cache is cut into pieces of equal size over all rows.

A piece is a run of positions of one row, one KV head at a time; all query heads that read it share its loads (M = 16 or
more query-head pairs, padded). The size of a piece follows from all lengths together, so that there are about as many
pieces as the device takes at once, whatever the mix of lengths; at least MIN_PIECE positions, so that short rows are one
piece and need no combination. The program that finishes a row's last piece combines them, in their order (split-KV:
Dao et al. 2023, "Flash-Decoding").

H query heads, K KV heads, D head_dim, N positions of a tile, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_rows import capped, pick, row_spans
from headrace.back.kernels.triton.grid import enter


@triton.jit
def decode_kernel(
    q,
    kv,
    out,
    starts,
    lengths,
    table,
    partial,
    counters,
    num_rows,
    num_pieces,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    block_stride,
    kind_stride,
    head_stride,
    table_stride,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (pieces at most, K). `num_pieces`: pieces wanted over all rows; `partial` float32 [pieces at most, K, M, D+2]."""
    i_piece = tl.program_id(0)
    i_head = tl.program_id(1)
    enter(DEPENDENT)
    o_r, b_queries, b_length, b_first = row_spans(starts, lengths, num_rows, WINDOW, ROWS)
    b_seen = tl.where((b_queries > 0) & (b_queries <= MAX_QUERIES), b_length - b_first, 0)
    piece = tl.maximum(tl.cdiv(tl.sum(b_seen, axis=0), num_pieces), MIN_PIECE)
    piece = tl.cdiv(piece, N) * N
    b_pieces = tl.cdiv(b_seen, piece)
    b_until = tl.cumsum(b_pieces, axis=0)
    if i_piece >= tl.sum(b_pieces, axis=0):
        return
    i_row = tl.sum((b_until <= i_piece).to(tl.int32), axis=0)
    here = o_r == i_row
    pieces = pick(b_pieces, here)
    first_piece = pick(b_until, here) - pieces
    length, queries = pick(b_length, here), pick(b_queries, here)
    begin = pick(b_first, here) + (i_piece - first_piece) * piece
    end = tl.minimum(begin + piece, length)

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    m_m = o_m < queries * GROUP
    o_token = tl.load(starts + i_row).to(tl.int64) + o_m // GROUP
    o_query_head = i_head * GROUP + o_m % GROUP
    p_q = (
        q + o_token[:, None] * q_token_stride + o_query_head[:, None] * q_head_stride + o_d[None, :]
    )
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    b_position = length - queries + o_m // GROUP

    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, D], tl.float32)
    scale_log2 = scale * 1.4426950408889634
    p_head = kv + i_head.to(tl.int64) * head_stride
    p_table = table + i_row.to(tl.int64) * table_stride
    for start in range(begin, end, N):
        o_n = start + tl.arange(0, N)
        m_n = o_n < end
        b_block = tl.load(p_table + o_n // BLOCK_TOKENS, mask=m_n, other=0).to(tl.int64)
        p_k = (
            p_head
            + (b_block * block_stride + o_n % BLOCK_TOKENS * HEAD_DIM)[:, None]
            + o_d[None, :]
        )
        b_k = tl.load(p_k, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_v = tl.load(p_k + kind_stride, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if SOFTCAP:
            b_s = capped(b_s * scale, softcap, SOFTCAP) * 1.4426950408889634
        else:
            b_s = b_s * scale_log2
        seen = m_n[None, :] & (o_n[None, :] <= b_position[:, None])
        if WINDOW:
            seen = seen & (o_n[None, :] > b_position[:, None] - WINDOW)
        b_s = tl.where(seen, b_s, float("-inf"))
        b_higher = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_higher

    p_out = out + o_token * out_token_stride + o_query_head * HEAD_DIM
    if pieces == 1:
        m_out = m_m[:, None] & m_d[None, :]
        b_out = (b_acc / b_sum[:, None]).to(out.dtype.element_ty)
        tl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_out)
        return
    STEP: tl.constexpr = KV_HEADS * M * (D + 2)
    p_mine = partial + (i_piece * KV_HEADS + i_head).to(tl.int64) * (M * (D + 2))
    tl.store(p_mine + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None])
    tl.store(p_mine + M * D + o_m, b_max, mask=m_m)
    tl.store(p_mine + M * D + M + o_m, b_sum, mask=m_m)
    tl.debug_barrier()
    p_counter = counters + i_row * KV_HEADS + i_head
    if tl.atomic_add(p_counter, 1, sem="acq_rel") == pieces - 1:
        tl.store(p_counter, 0)
        p_row = partial + (first_piece * KV_HEADS + i_head).to(tl.int64) * (M * (D + 2))
        first_token = tl.load(starts + i_row).to(tl.int64)
        for m in range(0, queries * GROUP):
            p_to = out + (first_token + m // GROUP) * out_token_stride
            p_to += (i_head * GROUP + m % GROUP) * HEAD_DIM + o_d
            b_row = _combined(p_row, m, pieces, M, D, STEP, PIECES)
            tl.store(p_to, b_row.to(out.dtype.element_ty), mask=m_d)


@triton.jit
def _combined(
    p_row, m, pieces, M: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, PIECES: tl.constexpr
):
    """One query head's result [D] from its row's pieces, PIECES at a time."""
    o_d = tl.arange(0, D)
    total = tl.full([1], 0.0, tl.float32)
    highest = tl.full([1], float("-inf"), tl.float32)
    b_acc = tl.zeros([D], tl.float32)
    for first in range(0, pieces, PIECES):
        o_s = first + tl.arange(0, PIECES)
        m_s = o_s < pieces
        p_s = p_row + o_s.to(tl.int64) * STEP
        b_max = tl.load(p_s + M * D + m, mask=m_s, other=float("-inf"), cache_modifier=".cg")
        b_sum = tl.load(p_s + M * D + M + m, mask=m_s, other=0.0, cache_modifier=".cg")
        b_part = tl.load(
            p_s[:, None] + m * D + o_d[None, :], mask=m_s[:, None], other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, tl.max(b_max, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        b_weight = tl.exp2(b_max - base)
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(b_weight * b_sum, axis=0)
        b_acc = b_acc * shrink + tl.sum(b_part * b_weight[:, None], axis=0)
        highest = higher
    return b_acc / total
