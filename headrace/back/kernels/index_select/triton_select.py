"""The select of an indexer's choice: the places of the highest of a row's scores, in order
(triton_index_select.py says how). Scores are int32 of the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.sparse_latent_attention.triton_sparse_latent import row_of
from headrace.back.kernels.triton.grid import enter_late

READ = 2048
"""Scores that the select reads at once."""


@triton.jit
def place_of(start, length, rows, i_t):
    """The row of a token, any for padding, and its position, -1 for padding."""
    i_row = row_of(start, rows, i_t)
    is_padding = i_t >= tl.load(start + rows)
    i_row = tl.where(is_padding, 0, i_row)
    position = tl.load(length + i_row) - (tl.load(start + i_row + 1) - i_t)
    return i_row, tl.where(is_padding, -1, position)


@triton.jit
def _choose_digit(b_counts, wanted):
    """The digit of the lowest chosen score, of how many scores have each [256], and how many are
    still wanted below it."""
    b_above = tl.cumsum(b_counts, axis=0, reverse=True)
    digit = tl.sum((b_above >= wanted).to(tl.int32), axis=0) - 1
    o_digit = tl.arange(0, 256)
    return digit, wanted - tl.sum(tl.where(o_digit > digit, b_counts, 0), axis=0)


@triton.jit
def _take(p_chosen, b_place, b_bits, m_n, lowest, wanted, count, ties):
    """Writes those of these places that are chosen behind `count` others; of equals to the lowest
    `ties` came before. Both with these."""
    b_tie = (m_n & (b_bits == lowest)).to(tl.int32)
    b_rank = ties + tl.cumsum(b_tie, axis=0)
    m_take = (m_n & (b_bits > lowest)) | ((b_tie == 1) & (b_rank <= wanted))
    b_take = m_take.to(tl.int32)
    tl.store(p_chosen + count + tl.cumsum(b_take, axis=0) - 1, b_place, mask=m_take)
    return count + tl.sum(b_take, axis=0), ties + tl.sum(b_tie, axis=0)


@triton.jit
def _take_all(p_chosen, seen, TOP_K: tl.constexpr, N: tl.constexpr):
    """Places [0, seen) and -1 behind them."""
    for first in range(0, TOP_K, N):
        o_k = first + tl.arange(0, N)
        tl.store(p_chosen + o_k, tl.where(o_k < seen, o_k, -1), mask=o_k < TOP_K)


@triton.jit
def select_kernel(
    scores, chosen, start, length, rows, first_token, score_stride, LISTS: tl.constexpr,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, BEGUN: tl.constexpr, LOCAL: tl.constexpr,
    N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, lists of each. BEGUN: groups are seen from their first
    position on, else from their last; the last LOCAL of those seen are always chosen."""
    enter_late(DEPENDENT)
    i_s, i_l = tl.program_id(0), tl.program_id(1)
    i_t = i_s + first_token
    _, position = place_of(start, length, rows, i_t)
    seen = (position + GROUP) // GROUP if BEGUN else (position + 1) // GROUP
    p_chosen = chosen + (i_t.to(tl.int64) * LISTS + i_l) * TOP_K
    if seen <= TOP_K:
        _take_all(p_chosen, seen, TOP_K, N)
        return
    p_score = scores + (i_s.to(tl.int64) * LISTS + i_l) * score_stride
    _select(p_score, p_score, False, p_chosen, seen, False, TOP_K, LOCAL, N)


@triton.jit
def _select(
    p_score, p_place, listed, p_chosen, seen, LISTED: tl.constexpr, TOP_K: tl.constexpr,
    LOCAL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Writes the places of the best of `seen` scores. With LISTED these may be those that stand at
    p_place: where `listed`."""
    o_n = tl.arange(0, N)
    prefix = 0  # of the lowest chosen score, whose sign bit is turned: digits are then in order
    wanted = TOP_K
    for shift in tl.static_range(24, -8, -8):
        b_counts = tl.zeros([256], tl.int32)
        for first in range(0, seen, N):
            b_bits = _turned(p_score, first + o_n, seen, LOCAL)
            m_n = first + o_n < seen
            if shift < 24:
                m_n = m_n & (((b_bits ^ prefix) >> (shift + 8)) == 0)
            b_counts += tl.histogram((b_bits >> shift) & 255, 256, mask=m_n).to(tl.int32)
        digit, wanted = _choose_digit(b_counts, wanted)
        prefix = prefix | (digit << shift)
    lowest = prefix ^ -2147483648
    count, ties = 0, 0
    for first in range(0, seen, N):
        b_place = first + o_n
        m_n = b_place < seen
        b_bits = _turned(p_score, b_place, seen, LOCAL) ^ -2147483648
        if LISTED:
            b_listed = tl.load(p_place + b_place, mask=m_n & listed, other=0)
            b_place = tl.where(listed, b_listed, b_place)
        count, ties = _take(p_chosen, b_place, b_bits, m_n, lowest, wanted, count, ties)


@triton.jit
def bound_kernel(
    scores, bounds, start, length, rows, first_token, score_stride, TOP_K: tl.constexpr,
    N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on. A bound that a little more than TOP_K of a token's scores
    are expected to reach, four standard deviations of a sample of N above it; rounded down to 16
    bits."""
    enter_late(DEPENDENT)
    i_s = tl.program_id(0)
    _, position = place_of(start, length, rows, i_s + first_token)
    seen = position + 1
    if seen <= TOP_K:
        return
    expected = TOP_K * 1.0 * N / seen
    wanted = (expected + 4.0 * tl.sqrt(expected) + 8.0).to(tl.int32)
    o_n = (tl.arange(0, N).to(tl.int64) * seen // N).to(tl.int32)
    b_bits = _turned(scores + i_s.to(tl.int64) * score_stride, o_n, seen, 0)
    prefix = 0
    if wanted <= N:
        for shift in tl.static_range(24, 8, -8):
            m_n = o_n < seen
            if shift < 24:
                m_n = m_n & (((b_bits ^ prefix) >> (shift + 8)) == 0)
            b_counts = tl.histogram((b_bits >> shift) & 255, 256, mask=m_n).to(tl.int32)
            digit, wanted = _choose_digit(b_counts, wanted)
            prefix = prefix | (digit << shift)
    tl.store(bounds + i_s, prefix ^ -2147483648)


@triton.jit
def count_part_kernel(
    scores, bounds, counts, start, length, rows, first_token, score_stride, TOP_K: tl.constexpr,
    N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, parts of N scores. How many scores of a part reach the
    bound: counts [tokens, parts]."""
    enter_late(DEPENDENT)
    i_s, i_p = tl.program_id(0), tl.program_id(1)
    _, position = place_of(start, length, rows, i_s + first_token)
    seen = position + 1
    if (seen <= TOP_K) | (i_p * N >= seen):
        return
    o_n = i_p * N + tl.arange(0, N)
    p_score = scores + i_s.to(tl.int64) * score_stride
    b_bits = tl.load(p_score + o_n, mask=o_n < seen, other=-2147483648)
    m_n = (o_n < seen) & (b_bits >= tl.load(bounds + i_s))
    tl.store(counts + i_s * tl.num_programs(1) + i_p, tl.sum(m_n.to(tl.int32), axis=0))


@triton.jit
def _candidates(p_counts, seen, until, N: tl.constexpr):
    """How many candidates stand in a token's parts before `until`."""
    total = 0
    for first in range(0, tl.minimum(until, tl.cdiv(seen, N)), 64):
        o_p = first + tl.arange(0, 64)
        m_p = (o_p < until) & (o_p * N < seen)
        total += tl.sum(tl.load(p_counts + o_p, mask=m_p, other=0), axis=0)
    return total


@triton.jit
def gather_part_kernel(
    scores, bounds, counts, candidates, start, length, rows, first_token, score_stride,
    TOP_K: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid as before. Puts the scores of a part that reach the bound, and their places, behind
    those of the parts before it, as far as there is room: candidates [tokens, 2, MOST]."""
    enter_late(DEPENDENT)
    i_s, i_p = tl.program_id(0), tl.program_id(1)
    _, position = place_of(start, length, rows, i_s + first_token)
    seen = position + 1
    if (seen <= TOP_K) | (i_p * N >= seen):
        return
    o_n = i_p * N + tl.arange(0, N)
    p_score = scores + i_s.to(tl.int64) * score_stride
    b_bits = tl.load(p_score + o_n, mask=o_n < seen, other=-2147483648)
    m_n = (o_n < seen) & (b_bits >= tl.load(bounds + i_s))
    before = _candidates(counts + i_s * tl.num_programs(1), seen, i_p, N)
    b_at = before + tl.cumsum(m_n.to(tl.int32), axis=0) - 1
    p_own = candidates + i_s.to(tl.int64) * (2 * MOST) + b_at
    tl.store(p_own, b_bits, mask=m_n & (b_at < MOST))
    tl.store(p_own + MOST, o_n, mask=m_n & (b_at < MOST))


@triton.jit
def select_candidates_kernel(
    scores, counts, candidates, chosen, start, length, rows, first_token, score_stride, parts,
    TOP_K: tl.constexpr, MOST: tl.constexpr, PART: tl.constexpr, N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on. The select among a token's candidates."""
    enter_late(DEPENDENT)
    i_s = tl.program_id(0)
    i_t = i_s + first_token
    _, position = place_of(start, length, rows, i_t)
    seen = position + 1
    p_chosen = chosen + i_t.to(tl.int64) * TOP_K
    if seen <= TOP_K:
        _take_all(p_chosen, seen, TOP_K, N)
        return
    total = _candidates(counts + i_s * parts, seen, parts, PART)
    listed = (total >= TOP_K) & (total <= MOST)
    p_own = candidates + i_s.to(tl.int64) * (2 * MOST)
    p_score = scores + i_s.to(tl.int64) * score_stride
    if listed:
        p_score, seen = p_own, total
    _select(p_score, p_own + MOST, listed, p_chosen, seen, True, TOP_K, 0, N)


@triton.jit
def _turned(p_score, o_s, seen, LOCAL: tl.constexpr):
    """The scores' bits with the sign bit turned."""
    b_bits = tl.load(p_score + o_s, mask=o_s < seen, other=-2147483648)
    if LOCAL:
        b_bits = tl.where(o_s >= seen - LOCAL, 0x7F800000, b_bits)
    return b_bits ^ -2147483648
