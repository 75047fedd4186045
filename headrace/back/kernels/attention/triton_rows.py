"""How a program of the attention kernels finds its work: from the rows' lengths on the device, in
registers.

Grids depend on the sizes of the tensors only, so that a captured graph serves every step of its
shape; each program reads all lengths (R of them, from the cache) and counts to its own place.
Programs beyond the work leave at once. R = ROWS padded rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pick(b_values, b_chosen):
    """The value where `b_chosen` (one place), as a scalar."""
    return tl.sum(tl.where(b_chosen, b_values, 0), axis=0)


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr):
    """The first positions that queries at `positions` see: of a window, or of chunks of -WINDOW."""
    if WINDOW < 0:
        first = tl.maximum(positions, 0) // -WINDOW * -WINDOW
    else:
        first = tl.maximum(positions - WINDOW + 1, 0)
    return first


@triton.jit
def row_spans(starts, lengths, num_rows, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Of every row: index, query tokens, KV length, and the first position any of its queries
    sees."""
    o_r = tl.arange(0, ROWS)
    m_r = o_r < num_rows
    b_start = tl.load(starts + o_r, mask=m_r, other=0)
    b_queries = tl.load(starts + o_r + 1, mask=m_r, other=0) - b_start
    b_length = tl.load(lengths + o_r, mask=m_r, other=0)
    b_first = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        b_first = first_seen(b_length - b_queries, WINDOW)
    return o_r, b_queries, b_length, b_first


@triton.jit
def alibi(b_slope, o_n, b_position):
    """What ALiBi adds to the scores of positions `o_n` for queries at `b_position`."""
    return b_slope[:, None] * (o_n[None, :] - b_position[:, None]).to(tl.float32)


@triton.jit
def capped(b_scores, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    if SOFTCAP:
        b_scores = softcap * (2.0 * tl.sigmoid(2.0 * b_scores / softcap) - 1.0)
    return b_scores
