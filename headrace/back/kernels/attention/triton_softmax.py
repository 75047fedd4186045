"""The online softmax that the Triton attention kernels share: one pass over positions with a
running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1), in units of log
2.

M query-head pairs, N positions of a tile. gluon_softmax.py holds the same for Gluon, whose kernels
cannot call these. Kernels whose results do not depend on the step take `fixed_step` and
`merge_results`: multiplications and additions that are spelled out, so that no compiler joins them
differently in another kernel, and sums over positions that are products with ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_narrow import narrow_pointers, narrow_values
from headrace.back.kernels.attention.triton_quantized import dequantized, scale_pointers
from headrace.back.kernels.attention.triton_rows import alibi, capped, first_seen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SUMS: tl.constexpr = tl.constexpr(16)
"""Columns of a product with ones, all alike: the least a matrix instruction takes."""


@triton.jit
def softmax_weights(b_s, b_max, factor, HIDDEN: tl.constexpr):
    """Weights [M, N] of scores against a new maximum, what earlier sums shrink by [M], and the
    maximum [M]. `factor`: of the scores, to units of log 2. HIDDEN: scores may be -Inf, and a row
    may have seen nothing yet."""
    b_higher = tl.maximum(b_max, tl.max(b_s, axis=1) * factor)
    if HIDDEN:
        b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    else:
        b_base = b_higher
    b_p = tl.exp2(b_s * factor - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    return b_p, b_shrink, b_higher


@triton.jit
def fixed_step(b_s, b_max, b_sums, b_acc, b_v, b_ones, factor):
    """Maximum [M], sums [M, SUMS] and weighted values [M, D] with N positions more, whose scores
    b_s are -Inf where hidden. b_ones [N, SUMS]; `factor`: of the scores, to units of log 2."""
    b_higher = tl.maximum(b_max, tl.max(b_s, axis=1) * factor)
    b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_p = tl.exp2(tl.fma(b_s, tl.zeros_like(b_s) + factor, tl.zeros_like(b_s) - b_base[:, None]))
    b_shrink = tl.exp2(b_max - b_base)
    b_p = b_p.to(b_v.dtype)
    b_sums = tl.dot(b_p, b_ones, b_sums * b_shrink[:, None], input_precision="ieee")
    b_acc = tl.dot(b_p, b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_higher, b_sums, b_acc


@triton.jit
def merge_results(b_max, b_sum, b_acc, n_max, n_sum, n_acc):
    """Two results as one; the left one may be empty (maximum -Inf)."""
    b_higher = tl.maximum(b_max, n_max)
    b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_left = tl.exp2(b_max - b_base)
    b_right = tl.exp2(n_max - b_base)
    b_sum = tl.fma(b_sum, b_left, n_sum * b_right)
    b_acc = tl.fma(b_acc, b_left[:, None] + tl.zeros_like(b_acc), n_acc * b_right[:, None])
    return b_higher, b_sum, b_acc


@triton.jit
def split_weights(b_highest, b_max, HIDDEN: tl.constexpr):
    """Weights of splits, by their maxima along axis 0, against a new highest one; what earlier sums
    shrink by, and the highest. HIDDEN: all may be -Inf."""
    b_higher = tl.maximum(b_highest, tl.max(b_max, axis=0))
    if HIDDEN:
        b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    else:
        b_base = b_higher
    return tl.exp2(b_max - b_base), tl.exp2(b_highest - b_base), b_higher


@triton.jit
def divisor(b_sum, CAUSAL: tl.constexpr):
    """What sums are divided by. A query that sees nothing, which causal ones never do, gives
    zeros."""
    if not CAUSAL:
        b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    return b_sum


@triton.jit
def store_lse(p_lse, b_max, b_sum, mask):
    """The natural log-sum-exp of maximum and sum; -Inf where nothing was seen."""
    tl.store(p_lse, (b_max + tl.log2(b_sum)) * 0.6931471805599453, mask=mask)


@triton.jit
def attend_tile(
    b_q, b_max, b_sum, b_acc, start, end, b_position, p_table, p_head, scales, i_head, block_stride,
    kind_stride, head_stride, scale, softcap, N: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr, BITS: tl.constexpr, HIDDEN: tl.constexpr, b_slope, ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values with N positions more, from `start` on and below `end`.
    HIDDEN: a query sees those up to its `b_position` if CAUSAL, and of WINDOW none further back
    from there; else all. If ALIBI, scores get `b_slope` times the position's distance from
    `b_position`. QUANTIZED: values of a byte with scales; NARROW: a form of less, or None."""
    o_n = start + tl.arange(0, N)
    o_d = tl.arange(0, D)
    m_n = o_n < end
    m_kv = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
    b_block = tl.load(p_table + o_n // BLOCK_TOKENS, mask=m_n, other=0).to(tl.int64)
    if NARROW is not None:
        p_n, p_slot = narrow_pointers(
            p_head, scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS, NARROW,
            HEAD_DIM,
        )  # fmt: skip
        b_k = narrow_values(p_n, p_slot, m_n, b_q.dtype, NARROW, HEAD_DIM)
        b_v = narrow_values(
            p_n + kind_stride, p_slot + kind_stride // 4, m_n, b_q.dtype, NARROW, HEAD_DIM
        )
    else:
        p_k = (
            p_head
            + (b_block * block_stride + o_n % BLOCK_TOKENS * HEAD_DIM)[:, None]
            + o_d[None, :]
        )
        b_k = tl.load(p_k, mask=m_kv, other=0.0)
        b_v = tl.load(p_k + kind_stride, mask=m_kv, other=0.0)
    if QUANTIZED:
        p_scale = scale_pointers(
            scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS, HEAD_DIM
        )
        b_k = dequantized(b_k, b_q.dtype, True, BITS)
        b_v = dequantized(b_v, b_q.dtype, False, BITS)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if QUANTIZED:
        b_s = b_s * tl.load(p_scale, mask=m_n, other=0.0)[None, :]
    if SOFTCAP:
        b_s = capped(b_s * scale, softcap, SOFTCAP) * 1.4426950408889634
    else:
        b_s = b_s * (scale * 1.4426950408889634)
    if ALIBI:
        b_s = b_s + alibi(b_slope, o_n, b_position) * 1.4426950408889634
    seen = m_n[None, :]
    if HIDDEN and CAUSAL:
        seen = seen & (o_n[None, :] <= b_position[:, None])
    if WINDOW:
        seen = seen & (o_n[None, :] >= first_seen(b_position, WINDOW)[:, None])
    b_s = tl.where(seen, b_s, float("-inf"))
    b_p, b_shrink, b_max = softmax_weights(b_s, b_max, 1.0, HIDDEN)
    b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_shrink[:, None]
    if QUANTIZED:
        b_p = b_p * tl.load(p_scale + kind_stride // 4, mask=m_n, other=0.0)[None, :]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_max, b_sum, b_acc
