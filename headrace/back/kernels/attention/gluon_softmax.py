"""The online softmax that the Gluon attention kernels share, as triton_softmax.py is for the
others: Gluon kernels cannot call those.

M query-head pairs of a tile; AXIS is that of the positions, since the decode kernel computes its
scores transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def softmax_weights(b_s, b_max, factor, HIDDEN: gl.constexpr, AXIS: gl.constexpr):
    """Weights of scores against a new maximum, what earlier sums shrink by [M], and the maximum
    [M], in units of the scores. `factor`: from these to log 2. HIDDEN: scores may be -Inf."""
    b_higher = gl.maximum(b_max, gl.max(b_s, axis=AXIS))
    b_base = b_higher * factor
    if HIDDEN:
        b_base = gl.where(b_higher == float("-inf"), 0.0, b_base)
    b_p = gl.exp2(b_s * factor - gl.expand_dims(b_base, AXIS))
    b_shrink = gl.exp2(b_max * factor - b_base)
    return b_p, b_shrink, b_higher


@gluon.jit
def store_lse(p_lse, b_max, b_sum, mask):
    """The natural log-sum-exp of a maximum in units of log 2 and a sum; -Inf where nothing was
    seen."""
    gl.store(p_lse, (b_max + gl.log2(b_sum)) * 0.6931471805599453, mask=mask)
