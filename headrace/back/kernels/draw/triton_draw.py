"""The draw in two launches, without a sort: what each row keeps ends at one logit, found by narrowing down the range in
which it lies (one program per row); then noise and argmax over what is kept, as kernels/gumbel does it.

A pass over a row weighs what reaches each of PIVOTS logits of the range: as a count for top_k, as probability for
top_p. The pivots divide the range between its least and greatest token evenly, but for one, which halves its bits: a
row takes about six passes at 150 thousand tokens, 33 at worst, and ties end it at once. Logits are compared as
integers of the same order. Rows that truncate nothing end early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.draw.op import NUMBERS, Draw, DrawProblem, Picks
from headrace.back.kernels.gumbel.triton_gumbel import CHUNK, chunk_winner, row_winner
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter, ordered
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    power_of_two,
    unsupported,
)

TILE, RUN, PIVOTS = 1024, 16, 8
MOST_KEPT = 4096
MOST_PASSES = 40
_LOWEST = tl.constexpr(-2139095041)
"""The order of -Inf."""


@triton.jit
def _value(b_order):
    """The logit of an order."""
    b_order = b_order.to(tl.int32)
    return tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order).to(tl.float32, bitcast=True)


@triton.jit
def _weights(b_x, m_x, top, per_nat, MASS: tl.constexpr):
    """What each token weighs: 1, or its probability times a constant."""
    if MASS:
        return tl.where(m_x, tl.exp2((b_x - top) * per_nat), 0.0)
    return tl.where(m_x, 1.0, 0.0)


@triton.jit
def _pivots(low, high, heat, P: tl.constexpr):
    """Orders [P] above `low` and below `high`, if there are any."""
    o_p = tl.arange(0, P)
    first, last = _value(low), _value(high - 1)
    b_even = first + (last - first) * ((o_p + 1).to(tl.float32) / P)
    b_spread = last - heat.to(tl.float32) * tl.exp2((o_p - 1).to(tl.float32))
    b_order = ordered(tl.where(first == float("-inf"), b_spread, b_even)).to(tl.int64)
    b_order = tl.where(o_p == 0, low + (high - low) // 2, b_order)
    return tl.minimum(tl.maximum(b_order, low + 1), high - 1)


@triton.jit
def _last_kept(
    p_row, width, low, top, heat, target, MASS: tl.constexpr, PASSES: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The order of the greatest logit at which the weight of all that reach it is at least `target` (float64). Among
    those of order `low` and above, whose weight is. Sums are single precision over RUN tokens, then double."""
    per_nat = (1.4426950408889634 / heat).to(tl.float32)
    high = ordered(top).to(tl.int64) + 1
    passes = tl.full([], 0, tl.int32)
    while passes < PASSES:
        b_pivot = _pivots(low, high, heat, P)
        b_weight = tl.zeros([P, TILE], tl.float64)
        b_least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
        b_most = tl.full([TILE], -0x7FFFFFFF, tl.int32)
        for begin in range(0, width, RUN * TILE):
            b_part = tl.zeros([P, TILE], tl.float32)
            for start in range(begin, tl.minimum(begin + RUN * TILE, width), TILE):
                o_v = start + tl.arange(0, TILE)
                m_v = o_v < width
                b_x = tl.load(p_row + o_v, mask=m_v, other=float("-inf"))
                b_order = ordered(b_x)
                b_one = _weights(b_x, m_v, top, per_nat, MASS)
                reaches = b_order[None, :] >= b_pivot.to(tl.int32)[:, None]
                b_part += tl.where(reaches, b_one[None, :], 0.0)
                inside = m_v & (b_order >= low) & (b_order < high)
                b_least = tl.minimum(b_least, tl.where(inside, b_order, 0x7FFFFFFF))
                b_most = tl.maximum(b_most, tl.where(inside, b_order, -0x7FFFFFFF))
            b_weight += b_part.to(tl.float64)
        enough = tl.sum(b_weight, axis=1) >= target
        least = tl.min(b_least, axis=0).to(tl.int64)
        most = tl.max(b_most, axis=0).to(tl.int64)
        above = tl.min(tl.where(enough, high, b_pivot), axis=0)
        below = tl.max(tl.where(enough, b_pivot, low), axis=0)
        one = least >= most
        low = tl.where(least > most, low, tl.where(one, least, tl.maximum(below, least)))
        high = tl.minimum(above, most + 1)
        passes = tl.where(one, PASSES, passes + 1)
    return low


@triton.jit
def _gather(p_row, width, low, p_kept, MOST: tl.constexpr, TILE: tl.constexpr):
    """Copies the logits of order `low` and above to `p_kept`, at most MOST; returns how many there are."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, width, TILE):
        o_v = start + tl.arange(0, TILE)
        b_x = tl.load(p_row + o_v, mask=o_v < width, other=float("-inf"))
        kept = (o_v < width) & (ordered(b_x) >= low)
        number = tl.sum(kept.to(tl.int32), axis=0)
        if number > 0:
            o_to = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(p_kept + o_to, b_x, mask=kept & (o_to < MOST))
        count += number
    return count


@triton.jit
def _least_by_min_p(top, heat, log_min_p):
    """The least logit that min_p keeps: z is compared in double precision, so neighbours of its product are tried."""
    least_z = top.to(tl.float64) / heat + log_min_p
    near = ordered((least_z * heat).to(tl.float32)) + tl.arange(0, 8) - 4
    b_value = _value(near)
    found = tl.min(
        tl.where(b_value.to(tl.float64) / heat >= least_z, b_value, float("inf")), axis=0
    )
    return tl.where(log_min_p == float("-inf"), float("-inf"), tl.minimum(found, top))


@triton.jit
def cut_kernel(
    logits,
    top,
    rows,
    row,
    cut,
    kept,
    row_stride,
    width,
    NUMBERS: tl.constexpr,
    MOST: tl.constexpr,
    PASSES: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step); `cut` float32: the least logit that each keeps. What few tokens top_k leaves lies in
    `kept` float32 [rows of the step, MOST] while top_p looks at them."""
    i_k = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    p_numbers = rows + tl.load(row + i_k).to(tl.int64) * NUMBERS
    heat = tl.load(p_numbers).to(tl.float64, bitcast=True)
    top_k = tl.load(p_numbers + 2)
    top_p = tl.load(p_numbers + 3).to(tl.float64, bitcast=True)
    log_min_p = tl.load(p_numbers + 4).to(tl.float64, bitcast=True)
    highest = tl.load(top + i_k)
    p_row = logits + i_k * row_stride
    low = tl.full([], _LOWEST, tl.int64)
    random = heat > 0.0
    p_from, count = p_row, width
    if random & (top_k > 0) & (top_k < width):
        low = _last_kept(
            p_row, width, low, highest, heat, top_k.to(tl.float64), False, PASSES, TILE, RUN, P
        )
        if top_p < 1.0:
            p_kept = kept + i_k * MOST
            number = _gather(p_row, width, low, p_kept, MOST, TILE)
            tl.debug_barrier()
            if number <= MOST:
                p_from, count = p_kept, number
    if random & (top_p < 1.0):
        per_nat = (1.4426950408889634 / heat).to(tl.float32)
        b_mass = tl.zeros([TILE], tl.float64)
        for start in range(0, count, TILE):
            o_v = start + tl.arange(0, TILE)
            b_x = tl.load(p_from + o_v, mask=o_v < count, other=float("-inf"))
            m_v = (o_v < count) & (ordered(b_x) >= low)
            b_mass += _weights(b_x, m_v, highest, per_nat, True).to(tl.float64)
        target = tl.sum(b_mass, axis=0) * top_p
        low = _last_kept(p_from, count, low, highest, heat, target, True, PASSES, TILE, RUN, P)
    least = _value(low)
    if heat > 0.0:
        least = tl.maximum(least, _least_by_min_p(highest, heat, log_min_p))
    tl.store(cut + i_k, least)


@triton.jit
def draw_kernel(
    logits,
    pick,
    top,
    rows,
    row,
    position,
    cut,
    score,
    best,
    counters,
    token,
    z,
    row_stride,
    width,
    chunks,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, chunks); `score` float64 and `best` int32, both [rows, chunks]."""
    i_k = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    enter(DEPENDENT)
    p_numbers = rows + tl.load(row + i_k).to(tl.int64) * NUMBERS
    heat = tl.load(p_numbers).to(tl.float64, bitcast=True)
    if heat == 0.0:
        if i_chunk == 0:
            tl.store(token + i_k, tl.load(pick + i_k))
            tl.store(z + i_k, tl.load(top + i_k).to(tl.float64))
        return
    H: tl.constexpr = 0xD1B54A32D192ED03
    b_key = tl.load(p_numbers + 1).to(tl.uint64, bitcast=True)
    b_key = b_key ^ (tl.load(position + i_k).to(tl.uint64) * H)
    b_key = (b_key ^ (b_key >> 30)) * 0xBF58476D1CE4E5B9
    b_key = (b_key ^ (b_key >> 27)) * 0x94D049BB133111EB
    row_key = (b_key ^ (b_key >> 31)).to(tl.int64, bitcast=True)
    p_row = logits + i_k * row_stride
    least = tl.load(cut + i_k)
    highest, i_best = chunk_winner(p_row, width, i_chunk, heat, row_key, least, CHUNK)
    row_winner(
        p_row, score + i_k * chunks, best + i_k * chunks, counters + i_k, token + i_k,
        z + i_k, chunks, heat, highest, i_best, i_chunk, CHUNKS,
    )  # fmt: skip


def cuts(
    logits_KV: torch.Tensor, top_K: torch.Tensor, rows: torch.Tensor, row_K: torch.Tensor
) -> torch.Tensor:
    """The least logit that each row keeps, float32 [K]; `top_K` is its greatest."""
    count, width = logits_KV.shape
    cut_K = torch.empty(count, dtype=torch.float32, device=logits_KV.device)
    kept = torch.empty(count * MOST_KEPT, dtype=torch.float32, device=logits_KV.device)
    cut_kernel[(count,)](
        logits_KV, top_K, rows, row_K, cut_K, kept, logits_KV.stride(0), width, NUMBERS=NUMBERS,
        MOST=MOST_KEPT, PASSES=MOST_PASSES, TILE=TILE, RUN=RUN, P=PIVOTS, num_warps=16,
        **launch(logits_KV.device),
    )  # fmt: skip
    return cut_K


def bind(problem: DrawProblem) -> Draw:
    """See the op."""

    def draw(
        logits_KV: torch.Tensor,
        picks: Picks,
        rows: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
    ) -> Picks:
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert rows.dtype == torch.int64 and rows.stride() == (NUMBERS, 1), rows.stride()
        (count, width), device = logits_KV.shape, logits_KV.device
        assert count <= COUNTERS and row_K.is_contiguous() and position_K.is_contiguous(), count
        chunks = triton.cdiv(width, CHUNK)
        new = {"device": device}
        cut_K = cuts(logits_KV, picks[1], rows, row_K)
        token_K = torch.empty(count, dtype=torch.int64, **new)
        z_K = torch.empty(count, dtype=torch.float64, **new)
        score = torch.empty(count * chunks, dtype=torch.float64, **new)
        best = torch.empty(count * chunks, dtype=torch.int32, **new)
        draw_kernel[(count, chunks)](
            logits_KV, *picks, rows, row_K, position_K, cut_K, score, best, counters(device),
            token_K, z_K, logits_KV.stride(0), width, chunks, NUMBERS=NUMBERS, CHUNK=CHUNK,
            CHUNKS=power_of_two(chunks, least=32), num_warps=8, **launch(device),
        )  # fmt: skip
        return token_K, z_K

    return draw


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
)
