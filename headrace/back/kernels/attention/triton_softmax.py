"""The online softmax that the Triton attention kernels share: one pass over positions with a
running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1), in units of log
2.

M query-head pairs, N positions of a tile. gluon_softmax.py holds the same for Gluon, whose kernels
cannot call these. triton_fixed.py spells its own steps out, for their order is what it promises.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
