"""Where the truncation of each row ends, in Triton: the least logit that top_k, and top_p behind
it, keep. Exact, without a sort. Five launches, whose programs leave at once where a row truncates
nothing:

    aim      one program per row: a sample of SAMPLE tokens tells about which logit the cut is
    narrow   twice, over pieces of rows: weighs what reaches each of PIVOTS logits, keeps the range
             between two of them
    gather   over pieces of rows: copies the logits of the range
    settle   one program per row: finds the cut among them

What reaches a logit weighs its count for top_k, its probability for top_p. Few tokens of top_k are
gathered on the sample's word alone, since their count proves it. Of a wrong word, or of more than
MOST_KEPT logits that are not all equal, the last looks at the whole row. Logits are compared as
integers of the same order.

A row's cut depends on the row alone: pieces are the same whatever the batch, and what is gathered
in any order is added up in multiples of 2^-40, which float64 does exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.greedy.op import Argmax
from headrace.back.kernels.gumbel.triton_race import span_winner
from headrace.back.kernels.sample.op import NUMBERS
from headrace.back.kernels.triton.grid import enter, ordered
from headrace.back.kernels.triton.wrap import launch, power_of_two

SAMPLE, PIECE, SETTLE, PIVOTS = 2048, 8192, 1024, 8
MOST_KEPT = 8192
AIM_PASSES, NARROW_PASSES, MOST_PASSES = 2, 2, 40
STATE = 8
"""int32 of each row: the mode; the range of orders in which the cut lies, from the second to below
the third; how many logits were gathered, the least and greatest order of them; programs of `narrow`
that are done."""
_NOTHING, _FEW, _RANGE, SAMPLED_BY_OP = (tl.constexpr(mode) for mode in range(4))
"""Modes: nothing to cut; all from the range on is gathered; the range is narrowed first; the token
is sampled."""
_LOWEST = tl.constexpr(-2139095041)
"""The order of -Inf."""
RowArguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""`rows`, `row_K` and `position_K` of the op."""


@triton.jit
def value_of(b_order):
    """The logit of an order."""
    b_order = b_order.to(tl.int32)
    return tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order).to(tl.float32, bitcast=True)


@triton.jit
def key_of(p_numbers, p_position):
    """The key of a row's noise (kernels/gumbel/noise.py), int64."""
    H: tl.constexpr = 0xD1B54A32D192ED03
    b_key = tl.load(p_numbers + 1).to(tl.uint64, bitcast=True)
    b_key = b_key ^ (tl.load(p_position).to(tl.uint64) * H)
    b_key = (b_key ^ (b_key >> 30)) * 0xBF58476D1CE4E5B9
    b_key = (b_key ^ (b_key >> 27)) * 0x94D049BB133111EB
    return (b_key ^ (b_key >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def least_by_min_p(p_numbers, top, heat):
    """The least logit that min_p keeps: z is compared in double precision, so neighbours of its
    product are tried."""
    log_min_p = tl.load(p_numbers + 4).to(tl.float64, bitcast=True)
    least_z = top.to(tl.float64) / heat + log_min_p
    near = ordered((least_z * heat).to(tl.float32)) + tl.arange(0, 8) - 4
    b_value = value_of(near)
    least = tl.min(
        tl.where(b_value.to(tl.float64) / heat >= least_z, b_value, float("inf")), axis=0
    )
    return tl.where(log_min_p == float("-inf"), float("-inf"), tl.minimum(least, top))


@triton.jit
def _asked(rows, row, i_k, width, NUMBERS: tl.constexpr):
    """(temperature, whether top_k acts, its k as float64, p)"""
    p_numbers = rows + tl.load(row + i_k).to(tl.int64) * NUMBERS
    heat = tl.load(p_numbers).to(tl.float64, bitcast=True)
    top_k = tl.load(p_numbers + 2)
    top_p = tl.load(p_numbers + 3).to(tl.float64, bitcast=True)
    return heat, (top_k > 0) & (top_k < width), top_k.to(tl.float64), top_p


@triton.jit
def _pivots(low, high, heat, first, P: tl.constexpr):
    """Orders [P]: `first`, then some above `low` and below `high`, if there are any: evenly between
    their logits, or 1, 2, 4 ... temperatures below the greatest where the least is infinite."""
    o_p = tl.arange(0, P)
    least, most = value_of(low), value_of(high - 1)
    b_even = least + (most - least) * (o_p.to(tl.float32) / P)
    b_spread = most - heat.to(tl.float32) * tl.exp2((o_p - 1).to(tl.float32))
    b_order = ordered(tl.where(least == float("-inf"), b_spread, b_even)).to(tl.int64)
    b_order = tl.minimum(tl.maximum(b_order, low + 1), high - 1)
    return tl.where(o_p == 0, first, b_order)


@triton.jit
def _wider(least, most, other_least, other_most):
    return tl.minimum(least, other_least), tl.maximum(most, other_most)


@triton.jit
def _weights(b_x, m_x, top, heat, by_mass):
    """What each token weighs: 1, or its probability times a constant, float32."""
    b_mass = tl.exp2((b_x - top) * (1.4426950408889634 / heat).to(tl.float32))
    return tl.where(m_x, tl.where(by_mass, b_mass, 1.0), 0.0)


@triton.jit
def _reached(b_order, b_one, b_pivot):
    """[P, N]: the weight of each of N tokens that reaches each pivot."""
    return tl.where(b_order[None, :] >= b_pivot.to(tl.int32)[:, None], b_one[None, :], 0.0)


@triton.jit
def _last_kept(
    p_x, count, low, high, top, heat, by_mass, amount, share,
    PASSES: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The order, from `low` to below `high`, of the greatest logit that is reached by a weight of
    at least `amount` plus `share` of what reaches `low`; `low` itself is not tried. One pivot
    halves the bits of the range: about five passes over 150 thousand logits, 33 at worst; ties end
    it at once."""
    target = amount
    passes = tl.full([], 0, tl.int32)
    o_p = tl.arange(0, P)
    while passes < PASSES:
        b_pivot = _pivots(low, high, heat, low + (high - low) // 2, P)
        b_pivot = tl.where(o_p == P - 1, low, b_pivot)
        b_weight = tl.zeros([P, TILE], tl.float64)
        b_least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
        b_most = tl.full([TILE], -0x7FFFFFFF, tl.int32)
        for start in range(0, count, TILE):
            o_x = start + tl.arange(0, TILE)
            m_x = o_x < count
            b_x = tl.load(p_x + o_x, mask=m_x, other=float("-inf"))
            b_order = ordered(b_x)
            b_one = (_weights(b_x, m_x, top, heat, by_mass).to(tl.float64) + 4096.0) - 4096.0
            b_weight += _reached(b_order, b_one, b_pivot)
            inside = m_x & (b_order >= low) & (b_order < high)
            b_least = tl.minimum(b_least, tl.where(inside, b_order, 0x7FFFFFFF))
            b_most = tl.maximum(b_most, tl.where(inside, b_order, -0x7FFFFFFF))
        weight = tl.sum(b_weight, axis=1)
        least, most = tl.reduce((b_least, b_most), 0, _wider)
        least, most = least.to(tl.int64), most.to(tl.int64)
        all_of_low = tl.sum(tl.where(o_p == P - 1, weight, 0.0), axis=0)
        target = tl.where(passes == 0, amount + share * all_of_low, target)
        enough = weight >= target
        above = tl.min(tl.where(enough | (o_p == P - 1), high, b_pivot), axis=0)
        below = tl.max(tl.where(enough, b_pivot, low), axis=0)
        one = least >= most
        low = tl.where(least > most, low, tl.where(one, least, tl.maximum(below, least)))
        high = tl.minimum(above, most + 1)
        passes = tl.where(one, PASSES, passes + 1)
    return low


@triton.jit
def aim_kernel(
    logits,
    top,
    rows,
    row,
    state,
    above,
    cut,
    row_stride,
    width,
    step,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    MOST: tl.constexpr,
    PASSES: tl.constexpr,
    SAMPLE: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step). SAMPLE tokens, `step` apart, are the sample; the margin is four
    standard deviations of what such a sample weighs."""
    i_k = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    heat, by_count, k, p = _asked(rows, row, i_k, width, NUMBERS)
    highest = tl.load(top + i_k)
    high = ordered(highest).to(tl.int64) + 1
    low = tl.full([], _LOWEST, tl.int64)
    mode = tl.full([], _NOTHING, tl.int32)
    if (heat > 0.0) & (by_count | (p < 1.0)) & (tl.abs(highest) < float("inf")):
        mode = tl.full([], _FEW, tl.int32)
        if width > MOST:
            o_x = tl.arange(0, SAMPLE)
            b_x = tl.load(logits + i_k * row_stride + o_x * step)
            b_order = ordered(b_x)
            b_one = _weights(b_x, o_x >= 0, highest, heat, ~by_count)
            share = (SAMPLE / width).to(tl.float32)
            number = k.to(tl.float32) * share
            mass = p.to(tl.float32) * (tl.sum(b_one, axis=0) + share) - share
            target = tl.where(by_count, number, tl.maximum(mass, 0.0))
            spread = tl.where(by_count, number + 4.0, tl.sum(b_one * b_one, axis=0))
            target += 4.0 * tl.sqrt_rn(spread)
            finite = tl.where(b_x == float("-inf"), float("inf"), b_x)
            low = tl.minimum(ordered(tl.min(finite, axis=0)).to(tl.int64), high - 1)
            last = high
            for _ in range(0, PASSES):
                b_pivot = _pivots(low, last, heat, low, P)
                weight = tl.sum(_reached(b_order, b_one, b_pivot), axis=1)
                last = tl.min(
                    tl.where((weight >= target) | (b_pivot <= low), last, b_pivot), axis=0
                )
                low = tl.max(tl.where(weight >= target, b_pivot, low), axis=0)
            mode = tl.where(by_count & (target < MOST // 2 * share), _FEW, _RANGE)
    p_state = state + i_k * STATE
    tl.store(p_state, mode)
    tl.store(p_state + 1, low.to(tl.int32))
    tl.store(p_state + 2, high.to(tl.int32))
    tl.store(p_state + 3, 0)
    tl.store(p_state + 4, 0x7FFFFFFF)
    tl.store(p_state + 5, -0x7FFFFFFF)
    tl.store(p_state + 6, 0)
    tl.store(above + i_k * 2, 0.0)
    tl.store(cut + i_k, float("-inf"))


@triton.jit
def narrow_kernel(
    logits,
    top,
    rows,
    row,
    state,
    above,
    partial,
    row_stride,
    width,
    pieces,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, pieces); `partial` float64 [rows of the step, pieces, P + 1]. `above`
    float64 [rows of the step, 2]: the weight above the range, and of the row."""
    i_k = tl.program_id(0).to(tl.int64)
    i_piece = tl.program_id(1)
    enter(DEPENDENT)
    p_state = state + i_k * STATE
    if tl.load(p_state) != _RANGE:
        return
    heat, by_count, k, p = _asked(rows, row, i_k, width, NUMBERS)
    low, high = tl.load(p_state + 1).to(tl.int64), tl.load(p_state + 2).to(tl.int64)
    b_pivot = _pivots(low, high, heat, low, P)
    p_row, highest = logits + i_k * row_stride, tl.load(top + i_k)
    begin = i_piece * PIECE
    b_weight = tl.zeros([P, TILE], tl.float32)
    b_whole = tl.zeros([TILE], tl.float32)
    for start in tl.range(begin, begin + PIECE, TILE, num_stages=STAGES):
        o_v = start + tl.arange(0, TILE)
        b_x = tl.load(p_row + o_v, mask=o_v < width, other=float("-inf"))
        b_one = _weights(b_x, o_v < width, highest, heat, ~by_count)
        b_weight += _reached(ordered(b_x), b_one, b_pivot)
        b_whole += b_one
    weight = tl.sum(b_weight.to(tl.float64), axis=1)
    whole = tl.sum(b_whole.to(tl.float64), axis=0)
    lowest = tl.full([], _LOWEST, tl.int64)
    o_p = tl.arange(0, P)
    p_partial = partial + i_k * pieces * (P + 1)
    tl.store(p_partial + i_piece * (P + 1) + o_p, weight)
    tl.store(p_partial + i_piece * (P + 1) + P, whole)
    tl.debug_barrier()
    if tl.atomic_add(p_state + 6, 1, sem="acq_rel") == pieces - 1:
        o_i = tl.arange(0, PIECES)
        p_pieces = p_partial + o_i * (P + 1)
        b_parts = tl.load(
            p_pieces[:, None] + o_p[None, :], mask=(o_i < pieces)[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        b_wholes = tl.load(p_pieces + P, mask=o_i < pieces, other=0.0, cache_modifier=".cg")
        weight, whole = tl.sum(b_parts, axis=0), tl.sum(b_wholes, axis=0)
        enough = weight >= tl.where(by_count, k, p * whole)
        over = tl.max(tl.where(enough, tl.load(above + i_k * 2), weight), axis=0)
        tl.store(above + i_k * 2, over)
        tl.store(above + i_k * 2 + 1, whole)
        tl.store(p_state + 1, tl.max(tl.where(enough, b_pivot, lowest), axis=0).to(tl.int32))
        tl.store(p_state + 2, tl.min(tl.where(enough, high, b_pivot), axis=0).to(tl.int32))
        tl.store(p_state + 6, 0)


@triton.jit
def gather_kernel(
    logits,
    state,
    kept,
    ids,
    row_stride,
    width,
    STATE: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, pieces); `kept` float32 and `ids` int32 [rows of the step, MOST], in
    any order."""
    i_k = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    p_state = state + i_k * STATE
    if tl.load(p_state) == _NOTHING:
        return
    low, high = tl.load(p_state + 1), tl.load(p_state + 2)
    p_row, p_kept = logits + i_k * row_stride, kept + i_k * MOST
    p_fill = p_state + 3 + tl.zeros([TILE], tl.int32)
    b_least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    b_most = tl.full([TILE], -0x7FFFFFFF, tl.int32)
    begin = tl.program_id(1) * PIECE
    for start in tl.range(begin, begin + PIECE, TILE, num_stages=STAGES):
        o_v = start + tl.arange(0, TILE)
        b_x = tl.load(p_row + o_v, mask=o_v < width, other=float("-inf"))
        b_order = ordered(b_x)
        inside = (o_v < width) & (b_order >= low) & (b_order < high)
        o_to = tl.atomic_add(p_fill, 1, mask=inside, sem="relaxed")
        tl.store(p_kept + o_to, b_x, mask=inside & (o_to < MOST))
        tl.store(ids + i_k * MOST + o_to, o_v, mask=inside & (o_to < MOST))
        b_least = tl.minimum(b_least, tl.where(inside, b_order, 0x7FFFFFFF))
        b_most = tl.maximum(b_most, tl.where(inside, b_order, -0x7FFFFFFF))
    least, most = tl.reduce((b_least, b_most), 0, _wider)
    if least <= most:
        tl.atomic_min(p_state + 4, least, sem="relaxed")
        tl.atomic_max(p_state + 5, most, sem="relaxed")


@triton.jit
def settle_kernel(
    logits,
    top,
    rows,
    row,
    state,
    above,
    position,
    kept,
    ids,
    cut,
    token,
    z,
    row_stride,
    width,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    MOST: tl.constexpr,
    PASSES: tl.constexpr,
    TILE: tl.constexpr,
    P: tl.constexpr,
    RACE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step); `cut` float32: the least logit that each row keeps. It is found
    among what was gathered where that holds it and there was room, otherwise in the row; of top_p
    behind top_k there too, unless all that top_k keeps was gathered. Then the token is sampled
    too."""
    i_k = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    p_state = state + i_k * STATE
    if tl.load(p_state) == _NOTHING:
        return
    heat, by_count, k, p = _asked(rows, row, i_k, width, NUMBERS)
    low, high = tl.load(p_state + 1).to(tl.int64), tl.load(p_state + 2).to(tl.int64)
    num_kept, over = tl.load(p_state + 3), tl.load(above + i_k * 2)
    tied = tl.load(p_state + 4) == tl.load(p_state + 5)
    good = (~by_count | (over + num_kept >= k)) & ((num_kept <= MOST) | tied)
    highest = tl.load(top + i_k)
    beyond = ordered(highest).to(tl.int64) + 1
    p_row = logits + i_k * row_stride
    p_from, count = p_row, width
    first, last = tl.full([], _LOWEST, tl.int64), beyond
    amount, share = tl.where(by_count, k, 0.0), tl.where(by_count, 0.0, p)
    whole = good & (high == beyond)
    if good:
        p_from, count = kept + i_k * MOST, tl.minimum(num_kept, MOST)
        first, last = low, high
        if not whole:
            mass = p * tl.load(above + i_k * 2 + 1)
            amount, share = tl.where(by_count, k, mass) - over, p * 0.0
    by_mass = ~by_count
    for _ in range(0, tl.where(by_count & (p < 1.0), 2, 1)):
        first = _last_kept(
            p_from, count, first, last, highest, heat, by_mass, amount, share, PASSES, TILE, P
        )
        last, amount, share = beyond, amount * 0.0, p
        by_mass = by_mass | (amount == amount)
        if not whole:
            p_from, count = p_row, width
    least = value_of(first)
    tl.store(cut + i_k, least)
    if whole & (num_kept <= MOST):
        p_numbers = rows + tl.load(row + i_k).to(tl.int64) * NUMBERS
        least = tl.maximum(least, least_by_min_p(p_numbers, highest, heat))
        _score, i_best = span_winner(
            p_row, kept + i_k * MOST, ids + i_k * MOST, 0, num_kept, heat,
            key_of(p_numbers, position + i_k), highest, least, True, RACE,
        )  # fmt: skip
        tl.store(token + i_k, i_best.to(tl.int64))
        tl.store(z + i_k, tl.load(p_row + i_best).to(tl.float64) / heat)
        tl.store(p_state, SAMPLED_BY_OP)


def cuts(
    logits_KV: torch.Tensor, top_K: torch.Tensor, arguments: RowArguments, choice: Argmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row STATE numbers, and the least logit that top_k and top_p keep, float32 [K];
    `top_K` is its greatest. `choice` of rows in mode DRAWN is made."""
    (count, width), device = logits_KV.shape, logits_KV.device
    pieces = triton.cdiv(width, PIECE)
    step = max(1, width // SAMPLE)
    state = torch.empty(count * STATE, dtype=torch.int32, device=device)
    above = torch.empty(count * 2, dtype=torch.float64, device=device)
    cut_K = torch.empty(count, dtype=torch.float32, device=device)
    kept = torch.empty(count * MOST_KEPT, dtype=torch.float32, device=device)
    partial = torch.empty(count * pieces * (PIVOTS + 1), dtype=torch.float64, device=device)
    ids = torch.empty(count * MOST_KEPT, dtype=torch.int32, device=device)
    rows, row_K, position_K = arguments
    seen = (logits_KV, top_K, rows, row_K, state, above)
    same = {"STATE": STATE, **launch(device)}
    aim_kernel[(count,)](
        *seen, cut_K, logits_KV.stride(0), width, step, NUMBERS=NUMBERS, MOST=MOST_KEPT,
        PASSES=AIM_PASSES, SAMPLE=SAMPLE, P=PIVOTS, num_warps=8, **same,
    )  # fmt: skip
    for _ in range(NARROW_PASSES):
        narrow_kernel[(count, pieces)](
            *seen, partial, logits_KV.stride(0), width, pieces, NUMBERS=NUMBERS, PIECE=PIECE,
            PIECES=power_of_two(pieces, least=32), TILE=min(PIECE, 512), STAGES=4, P=PIVOTS,
            num_warps=4, **same,
        )  # fmt: skip
    gather_kernel[(count, pieces)](
        logits_KV, state, kept, ids, logits_KV.stride(0), width, MOST=MOST_KEPT, PIECE=PIECE,
        TILE=min(PIECE, 1024), STAGES=4, num_warps=8, **same,
    )  # fmt: skip
    settle_kernel[(count,)](
        *seen, position_K, kept, ids, cut_K, *choice, logits_KV.stride(0), width, NUMBERS=NUMBERS,
        MOST=MOST_KEPT, PASSES=MOST_PASSES, TILE=SETTLE, P=2 * PIVOTS, RACE=SETTLE, num_warps=16,
        **same,
    )  # fmt: skip
    return state, cut_K
