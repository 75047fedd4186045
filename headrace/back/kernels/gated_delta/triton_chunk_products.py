"""What the gated delta rule over chunks (triton_chunks.py) computes for all chunks at once: what
does not read the state.

C tokens of a chunk; chunk i of a row whose first token in the step is t, of row r of the step, lies
in place t // C + r + i of the step's chunks: places are distinct and found without a list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.gated_delta.triton_gated_delta import fade_of
from headrace.back.kernels.gated_scan.triton_gated_scan import long_row_tokens
from headrace.back.kernels.triton.grid import enter

SUB = tl.constexpr(16)
"""Tokens of a block on the diagonal of A, which is inverted row by row."""
PART = tl.constexpr(64)
"""Of keys and values at a time, padded. Not 32: where such a tile lay first in shared memory, ptxas
of CUDA 12.8 (in Triton 3.6 and 3.7) added its descriptor's constant to another register."""
ROWS = tl.constexpr(256)
"""Rows of the step that are looked at together, to find a chunk's."""
FAINTEST = tl.constexpr(-90.0)
"""Below it exp is 0 in float32; kept so far that sums over a chunk stay exact enough."""


@triton.jit
def row_of_chunk(start, count, i_s, C: tl.constexpr):
    """The row of the step whose chunk lies, or would lie, at place i_s."""
    i_r = -1
    for i in range(0, count, ROWS):
        o_r = i + tl.arange(0, ROWS)
        b_first = tl.load(start + o_r, mask=o_r < count, other=0)
        i_r += tl.sum(((b_first // C + o_r <= i_s) & (o_r < count)).to(tl.int32), axis=0)
    return i_r


@triton.jit
def chunk_tokens(rows, start, states, count, i_s, C: tl.constexpr, LEAST: tl.constexpr):
    """The first token of the chunk at place i_s, and the one behind the last of its row; none if
    nothing lies there."""
    i_r = row_of_chunk(start, count, i_s, C)
    _, first, last = long_row_tokens(rows, start, states, LEAST, i_r)
    return first + (i_s - first // C - i_r) * C, last


@triton.jit
def _over_lengths(p_x, m_t, K: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr):
    """One over the length of each row of K."""
    o_k = tl.arange(0, BLOCK_K)
    b_x = tl.load(p_x[:, None] + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + EPS)


@triton.jit
def _fades(p_a, p_bias, m_t, m_a, b_decay, bound, BOUNDED: tl.constexpr):
    """The logarithms of what each token and channel keeps; 0 behind the row's end."""
    b_a = tl.load(p_a, mask=m_t, other=0.0).to(tl.float32)
    b_a += tl.load(p_bias, mask=m_a, other=0.0)
    b_fade = tl.maximum(fade_of(b_a, b_decay, bound, BOUNDED), FAINTEST)
    return tl.where(m_t, b_fade, 0.0)


@triton.jit
def unit_inverse(b_a, rows, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of A [C, C], which is 0 on and above its diagonal, and behind the first `rows`
    rows of each block of 16: the blocks on the diagonal row by row, D; with B = D A beyond them, of
    which at most C / 16 - 1 factors are not 0, the rest is (I - B)(I + B^2) D."""
    BLOCKS: tl.constexpr = C // SUB
    tl.static_assert(BLOCKS <= 4)
    o_i = tl.arange(0, C) // SUB
    o_n = tl.arange(0, SUB)
    b_own = (o_i[:, None] == tl.arange(0, BLOCKS)[None, :])[:, :, None]
    b_d = tl.sum(tl.where(b_own, tl.reshape(b_a, (C, BLOCKS, SUB)), 0.0), axis=1)
    b_d = -tl.reshape(b_d, (BLOCKS, SUB, SUB))
    b_x = b_d
    for i in range(1, rows):
        m_n = (o_n == i)[None, :, None]
        b_row = tl.sum(tl.where(m_n, b_d, 0.0), axis=1)
        b_row += tl.sum(b_row[:, :, None] * b_x, axis=1)
        b_x = tl.where(m_n, b_row[:, None, :], b_x)
    b_x += (o_n[:, None] == o_n[None, :]).to(tl.float32)[None, :, :]
    b_x = tl.reshape(b_x, (C, 1, SUB))
    b_t = tl.reshape(tl.where(b_own, b_x, 0.0), (C, C))
    if BLOCKS > 1:
        b_a = tl.where(o_i[:, None] > o_i[None, :], b_a, 0.0)
        b_b = tl.dot(b_t, b_a, input_precision=PRECISION)
        b_rest = -b_b
        if BLOCKS > 2:
            b_two = tl.dot(b_b, b_b, input_precision=PRECISION)
            b_rest += b_two - tl.dot(b_b, b_two, input_precision=PRECISION)
        b_t += tl.dot(b_rest, b_t, input_precision=PRECISION)
    return b_t


@triton.jit
def _row_of(b_x, o_i, i):
    """Row i of [C, K]; no row's is 0."""
    return tl.sum(tl.where((o_i == i)[:, None], b_x, 0.0), axis=0)


@triton.jit
def _rows_of_blocks(b_x, o_i, at, C: tl.constexpr, K: tl.constexpr):
    """For each row of [C, K] the one at `at` in its block of 16; before the first block is 0."""
    b_rows = tl.zeros((C, K), tl.float32)
    for block in tl.static_range(0, C // SUB):
        b_row = _row_of(b_x, o_i, at + block * SUB)
        b_rows = tl.where((o_i // SUB == block)[:, None], b_row[None, :], b_rows)
    return b_rows


@triton.jit
def _blocks_as_they_stand(b_q, b_k, b_l, rows, C: tl.constexpr, K: tl.constexpr):
    """The blocks on the diagonal, a column of each at a time."""
    BLOCKS: tl.constexpr = C // SUB
    o_b = tl.arange(0, C) // SUB
    o_n = tl.arange(0, SUB)
    b_q = tl.reshape(b_q, (BLOCKS, SUB, K))
    b_k = tl.reshape(b_k, (BLOCKS, SUB, K))
    b_l = tl.reshape(b_l, (BLOCKS, SUB, K))
    b_kk_own = tl.zeros((BLOCKS, SUB, SUB), tl.float32)
    b_qk_own = tl.zeros((BLOCKS, SUB, SUB), tl.float32)
    for j in range(0, rows):
        m_n = (o_n == j)[None, :, None]
        b_l_j = tl.sum(tl.where(m_n, b_l, 0.0), axis=1)
        b_k_j = tl.sum(tl.where(m_n, b_k, 0.0), axis=1)
        b_k_j = b_k_j[:, None, :] * tl.exp(tl.minimum(b_l - b_l_j[:, None, :], 0.0))
        m_j = (o_n == j)[None, None, :]
        b_kk_own = tl.where(m_j, tl.sum(b_k * b_k_j, axis=2)[:, :, None], b_kk_own)
        b_qk_own = tl.where(m_j, tl.sum(b_q * b_k_j, axis=2)[:, :, None], b_qk_own)
    b_own = (o_b[:, None] == tl.arange(0, BLOCKS)[None, :])[:, :, None]
    b_kk_own = tl.where(b_own, tl.reshape(b_kk_own, (C, 1, SUB)), 0.0)
    b_qk_own = tl.where(b_own, tl.reshape(b_qk_own, (C, 1, SUB)), 0.0)
    return tl.reshape(b_kk_own, (C, C)), tl.reshape(b_qk_own, (C, C))


@triton.jit
def _channel_products(b_q, b_k, b_l, rows, DTYPE: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Of channels that fade by rates of their own: sum_c k_ic k_jc exp(L_ic - L_jc) and the same of
    queries, [C, C], right where j <= i: by products of what has faded since the middle of i's block
    of 16, and what j's fades until then. One of the two grows inside the block; where that leaves
    the range of numbers, both are taken at the end of the block before, and blocks on the diagonal
    as they stand."""
    BLOCKS: tl.constexpr = C // SUB
    MIDDLE: tl.constexpr = SUB // 2
    REACH: tl.constexpr = 8.0 if tl.float16 == DTYPE else 75.0
    o_i = tl.arange(0, C)
    o_b = o_i // SUB
    b_at = _rows_of_blocks(b_l, o_i, MIDDLE, C, K)
    fits = tl.max(tl.max(tl.abs(b_at - b_l), axis=1), axis=0) <= REACH
    own = fits.to(tl.int32)
    at = own * (MIDDLE + 1) - 1
    b_since = tl.exp(tl.minimum(b_l - _rows_of_blocks(b_l, o_i, at, C, K), REACH))
    b_qs = (b_q * b_since).to(DTYPE)
    b_ks = (b_k * b_since).to(DTYPE)
    b_kk = tl.zeros((C, C), tl.float32)
    b_qk = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(0, BLOCKS):
        b_until = tl.exp(tl.minimum(_row_of(b_l, o_i, at + block * SUB)[None, :] - b_l, REACH))
        b_until = b_k * b_until
        b_until = tl.trans(tl.where((o_b < block + own)[:, None], b_until, 0.0).to(DTYPE))
        m_b = (o_b == block)[:, None]
        b_kk = tl.where(m_b, tl.dot(b_ks, b_until, input_precision="ieee"), b_kk)
        b_qk = tl.where(m_b, tl.dot(b_qs, b_until, input_precision="ieee"), b_qk)
    if not fits:
        b_kk_own, b_qk_own = _blocks_as_they_stand(b_q, b_k, b_l, rows, C, K)
        b_kk += b_kk_own
        b_qk += b_qk_own
    return b_kk, b_qk


@triton.jit(do_not_specialize=["states", "count"])
def chunk_products_kernel(
    q,
    k,
    v,
    a,
    b,
    decay,
    bias,
    y,
    w,
    queries,
    keys,
    weights,
    kept,
    rows,
    start,
    states,
    count,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    scale,
    beta_scale,
    bound,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    C: tl.constexpr,
    LEAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """W [T, H, K], U [T, H, V] in y's place, queries and keys [T, H, K] with what fades before and
    behind them, weights of u in y [T, H, C], and what a chunk keeps of the state [places, H] or
    [places, H, K]."""
    enter(DEPENDENT)
    i_s = tl.program_id(0)
    i_h = tl.program_id(1)
    begin, last = chunk_tokens(rows, start, states, count, i_s, C, LEAST)
    if begin < last:
        DTYPE: tl.constexpr = w.dtype.element_ty
        o_i = tl.arange(0, C)
        m_t = begin + o_i < last
        # No constant: the compiler would unroll loops over it.
        ahead = tl.minimum(last - begin, SUB).to(tl.int32)
        i_t = begin * HEADS + i_h
        o_t = o_i * HEADS
        p_q = q + begin * q_stride + i_h // PER_KEY * K + o_i * q_stride
        p_k = k + begin * k_stride + i_h // PER_KEY * K + o_i * k_stride
        p_a = a + begin * a_stride + o_i * a_stride
        b_over_q = _over_lengths(p_q, m_t, K, BLOCK_K, EPS) * scale
        b_over_k = _over_lengths(p_k, m_t, K, BLOCK_K, EPS)
        b_beta = tl.load(b + begin * b_stride + i_h + o_i * b_stride, mask=m_t, other=0.0)
        b_beta = tl.where(m_t, beta_scale * tl.sigmoid(b_beta.to(tl.float32)), 0.0)
        b_decay = tl.load(decay + i_h)
        if not CHANNELS:
            b_fade = _fades(p_a + i_h, bias + i_h, m_t, True, b_decay, bound, BOUNDED)
            b_sum = tl.cumsum(b_fade, axis=0)
            b_total = tl.sum(b_fade, axis=0)
            b_since = tl.exp(tl.minimum(b_sum[:, None] - b_sum[None, :], 0.0))
            tl.store(kept + i_s.to(tl.int64) * HEADS + i_h, tl.exp(b_total))
        b_kk = tl.zeros((C, C), tl.float32)
        b_qk = tl.zeros((C, C), tl.float32)
        for i_k in tl.range(0, BLOCK_K, PART, num_stages=1):
            o_k = i_k + tl.arange(0, PART)
            m_k = o_k < K
            m_tk = m_t[:, None] & m_k[None, :]
            b_q = tl.load(p_q[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
            b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
            b_q *= b_over_q[:, None]
            b_k *= b_over_k[:, None]
            if CHANNELS:
                o_a = i_h * K + o_k[None, :]
                b_fade = _fades(
                    p_a[:, None] + o_a, bias + o_a, m_tk, m_k[None, :], b_decay, bound, BOUNDED
                )
                b_l = tl.cumsum(b_fade, axis=0)
                b_all = tl.sum(b_fade, axis=0)
                p_kept = kept + (i_s.to(tl.int64) * HEADS + i_h) * K + o_k
                tl.store(p_kept, tl.exp(b_all), mask=m_k)
                b_all = b_all[None, :]
                b_kk_part, b_qk_part = _channel_products(b_q, b_k, b_l, ahead, DTYPE, C, PART)
                b_kk += b_kk_part
                b_qk += b_qk_part
            else:
                b_l = b_sum[:, None]
                b_all = b_total
                b_k_t = tl.trans(b_k.to(DTYPE))
                b_kk = tl.dot(b_k.to(DTYPE), b_k_t, b_kk, input_precision="ieee")
                b_qk = tl.dot(b_q.to(DTYPE), b_k_t, b_qk, input_precision="ieee")
            o_tk = o_t[:, None] * K + o_k[None, :]
            b_q *= tl.exp(b_l)
            b_k *= tl.exp(tl.minimum(b_all - b_l, 0.0))
            tl.store(queries + i_t * K + o_tk, b_q.to(DTYPE), mask=m_tk)
            tl.store(keys + i_t * K + o_tk, b_k.to(DTYPE), mask=m_tk)
        if not CHANNELS:
            b_kk *= b_since
            b_qk *= b_since
        b_qk = tl.where(o_i[:, None] >= o_i[None, :], b_qk, 0.0).to(DTYPE)
        tl.store(weights + i_t * C + o_t[:, None] * C + o_i[None, :], b_qk, mask=m_t[:, None])
        b_kk = tl.where(o_i[:, None] > o_i[None, :], b_kk * b_beta[:, None], 0.0)
        b_t = (unit_inverse(b_kk, ahead, C, PRECISION) * b_beta[None, :]).to(DTYPE)
        for i_k in tl.range(0, BLOCK_K, PART, num_stages=1):
            o_k = i_k + tl.arange(0, PART)
            m_k = o_k < K
            m_tk = m_t[:, None] & m_k[None, :]
            b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
            b_k *= b_over_k[:, None]
            if CHANNELS:
                o_a = i_h * K + o_k[None, :]
                b_fade = _fades(
                    p_a[:, None] + o_a, bias + o_a, m_tk, m_k[None, :], b_decay, bound, BOUNDED
                )
                b_k *= tl.exp(tl.cumsum(b_fade, axis=0))
            else:
                b_k *= tl.exp(b_sum)[:, None]
            b_w = tl.dot(b_t, b_k.to(DTYPE), input_precision="ieee").to(DTYPE)
            tl.store(w + i_t * K + o_t[:, None] * K + o_k[None, :], b_w, mask=m_tk)
        p_v = v + begin * v_stride + i_h * V + o_i * v_stride
        for i_v in tl.range(0, V, PART, num_stages=1):
            o_v = i_v + tl.arange(0, PART)
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            b_v = tl.load(p_v[:, None] + o_v[None, :], mask=m_tv, other=0.0)
            b_u = tl.dot(b_t, b_v, input_precision="ieee").to(DTYPE)
            tl.store(y + i_t * V + o_t[:, None] * V + o_v[None, :], b_u, mask=m_tv)
