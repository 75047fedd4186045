"""Where the truncation of each row ends, in Triton: the least logit that top_k, and top_p behind it, keep. Exact,
without a sort. Four launches, whose programs leave at once where a row truncates nothing:

    aim      one program per row: a sample of SAMPLE tokens tells about which logit the cut is
    narrow   twice, over pieces of rows: weighs what reaches each of PIVOTS logits, keeps the range between two of them
    gather   over pieces of rows: copies the logits of the range; the program that is last of its row finds the cut

What reaches a logit weighs its count for top_k, its probability for top_p. Few tokens of top_k are gathered on the
sample's word alone, since their count proves it. Of a wrong word, or of more than MOST_KEPT logits that are not all
equal, the last program looks at the whole row. Logits are compared as integers of the same order.

A row's cut depends on the row alone: pieces are the same whatever the batch, and what is gathered in any order is added
up in multiples of 2^-40, which float64 does exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.draw.op import NUMBERS
from headrace.back.kernels.triton.grid import enter, ordered
from headrace.back.kernels.triton.wrap import launch, power_of_two

SAMPLE, PIECE, PIVOTS = 4096, 8192, 8
MOST_KEPT = 8192
AIM_PASSES, NARROW_PASSES, MOST_PASSES = 4, 2, 40
STATE = 8
"""int32 of each row: MODE, LOW, HIGH (the range of orders in which the cut lies, HIGH not among them), how many logits
were gathered, the least and greatest order of them, programs that are done."""
_NOTHING, _FEW, _RANGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LOWEST = tl.constexpr(-2139095041)
"""The order of -Inf."""


@triton.jit
def value_of(b_order):
    """The logit of an order."""
    b_order = b_order.to(tl.int32)
    return tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order).to(tl.float32, bitcast=True)


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
    """Orders [P]: `first`, then some above `low` and below `high`, if there are any: evenly between their logits, or
    1, 2, 4 ... temperatures below the greatest where the least is infinite."""
    o_p = tl.arange(0, P)
    least, most = value_of(low), value_of(high - 1)
    b_even = least + (most - least) * (o_p.to(tl.float32) / P)
    b_spread = most - heat.to(tl.float32) * tl.exp2((o_p - 1).to(tl.float32))
    b_order = ordered(tl.where(least == float("-inf"), b_spread, b_even)).to(tl.int64)
    b_order = tl.minimum(tl.maximum(b_order, low + 1), high - 1)
    return tl.where(o_p == 0, first, b_order)


@triton.jit
def _weigh(
    p_x, count, stride, b_pivot, low, high, top, heat, by_mass,
    EXACT: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Of logits `stride` apart: the weight of those that reach each pivot, float64 [P]; of those that reach `low`; the
    least and greatest order from `low` to below `high`."""
    per_nat = (1.4426950408889634 / heat).to(tl.float32)
    SUM: tl.constexpr = tl.float64 if EXACT else tl.float32
    b_weight = tl.zeros([P, TILE], SUM)
    b_all = tl.zeros([TILE], SUM)
    b_least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    b_most = tl.full([TILE], -0x7FFFFFFF, tl.int32)
    for start in range(0, count, TILE):
        o_x = start + tl.arange(0, TILE)
        m_x = o_x < count
        b_x = tl.load(p_x + o_x * stride, mask=m_x, other=float("-inf"))
        b_order = ordered(b_x)
        b_one = tl.where(by_mass, tl.exp2((b_x - top) * per_nat), 1.0)
        b_one = tl.where(m_x, b_one, 0.0)
        if EXACT:
            b_one = (b_one.to(tl.float64) + 4096.0) - 4096.0
        zero = tl.zeros([TILE], SUM)
        b_weight += tl.where(b_order[None, :] >= b_pivot.to(tl.int32)[:, None], b_one[None, :], 0.0)
        b_all += tl.where(b_order >= low, b_one, zero)
        inside = m_x & (b_order >= low) & (b_order < high)
        b_least = tl.minimum(b_least, tl.where(inside, b_order, 0x7FFFFFFF))
        b_most = tl.maximum(b_most, tl.where(inside, b_order, -0x7FFFFFFF))
    weight = tl.sum(b_weight.to(tl.float64), axis=1)
    least, most = tl.min(b_least, axis=0).to(tl.int64), tl.max(b_most, axis=0).to(tl.int64)
    return weight, tl.sum(b_all.to(tl.float64), axis=0), least, most


@triton.jit
def _last_kept(
    p_x, count, stride, low, high, top, heat, by_mass, amount, share,
    PASSES: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The order, from `low` to below `high`, of the greatest logit that is reached by a weight of at least `amount`
    plus `share` of what reaches `low`; `low` itself is not tried. One pivot halves the bits of the range: about six
    passes over 150 thousand logits, 33 at worst; ties end it at once."""
    target = amount
    passes = tl.full([], 0, tl.int32)
    while passes < PASSES:
        b_pivot = _pivots(low, high, heat, low + (high - low) // 2, P)
        weight, reach_low, least, most = _weigh(
            p_x, count, stride, b_pivot, low, high, top, heat, by_mass, EXACT, TILE, P
        )
        target = tl.where(passes == 0, amount + share * reach_low, target)
        enough = weight >= target
        above = tl.min(tl.where(enough, high, b_pivot), axis=0)
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
    count,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    MOST: tl.constexpr,
    PASSES: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step). `count` tokens, `step` apart, are the sample; the margin is four standard deviations of
    what such a sample weighs."""
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
            p_row = logits + i_k * row_stride
            o_x = tl.arange(0, SAMPLE)
            b_x = tl.load(p_row + o_x * step, mask=o_x < count, other=float("-inf"))
            b_one = tl.exp2((b_x - highest) * (1.4426950408889634 / heat).to(tl.float32))
            share = count.to(tl.float64) / width
            mass = p * (tl.sum(b_one, axis=0) + share) - share
            mass += 4.0 * tl.sqrt_rn(tl.sum(b_one * b_one, axis=0)).to(tl.float64)
            number = k * share + 4.0 * tl.sqrt_rn((k * share).to(tl.float32)) + 8.0
            low = _last_kept(
                p_row, count, step, low, high, highest, heat, ~by_count,
                tl.where(by_count, number, mass), 0.0, PASSES, False, TILE, P,
            )  # fmt: skip
            few = by_count & (number < MOST // 2 * share)
            mode = tl.where(few, _FEW, _RANGE)
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
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, pieces); `partial` float64 [rows of the step, pieces, P + 1]. `above` float64 [rows of
    the step, 2]: the weight above the range, and of the row."""
    i_k = tl.program_id(0).to(tl.int64)
    i_piece = tl.program_id(1)
    enter(DEPENDENT)
    p_state = state + i_k * STATE
    if tl.load(p_state) != _RANGE:
        return
    heat, by_count, k, p = _asked(rows, row, i_k, width, NUMBERS)
    low, high = tl.load(p_state + 1).to(tl.int64), tl.load(p_state + 2).to(tl.int64)
    b_pivot = _pivots(low, high, heat, low, P)
    begin = i_piece * PIECE
    lowest = tl.full([], _LOWEST, tl.int64)
    weight, whole, _least, _most = _weigh(
        logits + i_k * row_stride + begin, tl.minimum(width - begin, PIECE), 1, b_pivot, lowest,
        high, tl.load(top + i_k), heat, ~by_count, False, TILE, P,
    )  # fmt: skip
    o_p = tl.arange(0, P)
    p_partial = partial + i_k * pieces * (P + 1)
    tl.store(p_partial + i_piece * (P + 1) + o_p, weight)
    tl.store(p_partial + i_piece * (P + 1) + P, whole)
    tl.debug_barrier()
    if tl.atomic_add(p_state + 6, 1, sem="acq_rel") == pieces - 1:
        o_i = tl.arange(0, PIECES)
        p_pieces = p_partial + o_i * (P + 1)
        b_part = tl.load(
            p_pieces[:, None] + o_p[None, :], mask=(o_i < pieces)[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        b_whole = tl.load(p_pieces + P, mask=o_i < pieces, other=0.0, cache_modifier=".cg")
        weight, whole = tl.sum(b_part, axis=0), tl.sum(b_whole, axis=0)
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
    top,
    rows,
    row,
    state,
    above,
    kept,
    cut,
    row_stride,
    width,
    pieces,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    MOST: tl.constexpr,
    PASSES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    SETTLE: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, pieces); `kept` float32 [rows of the step, MOST]; `cut` float32: the least logit that
    each row keeps."""
    i_k = tl.program_id(0).to(tl.int64)
    i_piece = tl.program_id(1)
    enter(DEPENDENT)
    p_state = state + i_k * STATE
    if tl.load(p_state) == _NOTHING:
        return
    low, high = tl.load(p_state + 1), tl.load(p_state + 2)
    p_row, p_kept = logits + i_k * row_stride, kept + i_k * MOST
    for start in range(i_piece * PIECE, tl.minimum(i_piece * PIECE + PIECE, width), TILE):
        o_v = start + tl.arange(0, TILE)
        b_x = tl.load(p_row + o_v, mask=o_v < width, other=float("-inf"))
        b_order = ordered(b_x)
        inside = (o_v < width) & (b_order >= low) & (b_order < high)
        number = tl.sum(inside.to(tl.int32), axis=0)
        if number > 0:
            o_to = tl.atomic_add(p_state + 3, number, sem="relaxed")
            o_to += tl.cumsum(inside.to(tl.int32), axis=0) - 1
            tl.store(p_kept + o_to, b_x, mask=inside & (o_to < MOST))
            least = tl.min(tl.where(inside, b_order, 0x7FFFFFFF), axis=0)
            most = tl.max(tl.where(inside, b_order, -0x7FFFFFFF), axis=0)
            tl.atomic_min(p_state + 4, least, sem="relaxed")
            tl.atomic_max(p_state + 5, most, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(p_state + 6, 1, sem="acq_rel") == pieces - 1:
        heat, by_count, k, p = _asked(rows, row, i_k, width, NUMBERS)
        highest = tl.load(top + i_k)
        found = tl.load(p_state + 3, cache_modifier=".cg")
        least = tl.load(p_state + 4, cache_modifier=".cg")
        most = tl.load(p_state + 5, cache_modifier=".cg")
        over, mass = tl.load(above + i_k * 2), tl.load(above + i_k * 2 + 1)
        good = (~by_count | (over + found >= k)) & ((found <= MOST) | (least == most))
        _settle(
            p_row, width, p_kept, found, low, high, over, mass, highest, heat, by_count, k, p,
            good, cut + i_k, MOST, PASSES, SETTLE, P,
        )  # fmt: skip


@triton.jit
def _settle(
    p_row, width, p_kept, found, low, high, over, mass, highest, heat, by_count, k, p, good, p_cut,
    MOST: tl.constexpr, PASSES: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Finds the cut among what was gathered if that is `good`, otherwise in the row; of top_p behind top_k there too,
    unless all that top_k keeps was gathered. `over` lies above the range; `mass` is the row's."""
    beyond = ordered(highest).to(tl.int64) + 1
    p_from, count = p_row, width
    first, last = tl.full([], _LOWEST, tl.int64), beyond
    amount, share = tl.where(by_count, k, 0.0), tl.where(by_count, 0.0, p)
    whole = good & (high == beyond)
    if good:
        p_from, count = p_kept, tl.minimum(found, MOST)
        first, last = low.to(tl.int64), high.to(tl.int64)
        if not whole:
            amount, share = tl.where(by_count, k, p * mass) - over, p * 0.0
    by_mass = ~by_count
    for _ in range(0, tl.where(by_count & (p < 1.0), 2, 1)):
        first = _last_kept(
            p_from, count, 1, first, last, highest, heat, by_mass, amount, share,
            PASSES, True, TILE, P,
        )  # fmt: skip
        last, amount, share = beyond, amount * 0.0, p
        by_mass = by_mass | (amount == amount)
        if not whole:
            p_from, count = p_row, width
    tl.store(p_cut, value_of(first))


def cuts(
    logits_KV: torch.Tensor, top_K: torch.Tensor, rows: torch.Tensor, row_K: torch.Tensor
) -> torch.Tensor:
    """The least logit that top_k and top_p keep of each row, float32 [K]; `top_K` is its greatest."""
    (count, width), device = logits_KV.shape, logits_KV.device
    pieces = triton.cdiv(width, PIECE)
    step = max(1, width // SAMPLE)
    state = torch.empty(count * STATE, dtype=torch.int32, device=device)
    above = torch.empty(count * 2, dtype=torch.float64, device=device)
    cut_K = torch.empty(count, dtype=torch.float32, device=device)
    kept = torch.empty(count * MOST_KEPT, dtype=torch.float32, device=device)
    partial = torch.empty(count * pieces * (PIVOTS + 1), dtype=torch.float64, device=device)
    given = (logits_KV, top_K, rows, row_K, state, above)
    same = {"NUMBERS": NUMBERS, "STATE": STATE, "P": PIVOTS, **launch(device)}
    aim_kernel[(count,)](
        *given, cut_K, logits_KV.stride(0), width, step, min(SAMPLE, width // step), MOST=MOST_KEPT,
        PASSES=AIM_PASSES, SAMPLE=SAMPLE, TILE=min(SAMPLE, 2048), num_warps=16, **same,
    )  # fmt: skip
    for _ in range(NARROW_PASSES):
        narrow_kernel[(count, pieces)](
            *given, partial, logits_KV.stride(0), width, pieces, PIECE=PIECE,
            PIECES=power_of_two(pieces, least=32), TILE=min(PIECE, 1024), num_warps=8, **same,
        )  # fmt: skip
    gather_kernel[(count, pieces)](
        *given, kept, cut_K, logits_KV.stride(0), width, pieces, MOST=MOST_KEPT,
        PASSES=MOST_PASSES, PIECE=PIECE, TILE=min(PIECE, 2048), SETTLE=512, num_warps=8, **same,
    )  # fmt: skip
    return cut_K
