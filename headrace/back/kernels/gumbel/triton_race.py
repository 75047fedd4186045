"""The race of sampling in Triton, of ops gumbel and sample: who wins among the ids of a span, and
how the programs of a row agree.

The greatest z - log E is the least E / exp(z): who arrives first. What each arrival is at least is
found in float32, in two instructions that are not plain ones: E = -log1p(-u) is no less than u, and
u no less than its upper 32 bits. Only tokens that may arrive before the first's exact score are
scored exactly. Noise spans 48 nats, so that whoever is beyond float32 behind the greatest logit is
out of the race.

Rows are cut into spans. A program keeps the least arrival of each place of its tiles, and the
second least as a number: where that one may win too, it passes over its span once more. The program
that finishes a row's last span compares the spans. The noise is that of noise.py.

Error of an arrival, in bits: 2^-22 of the power, 2^-22 of up to 128 of its exponent, 2^-24 of u;
ROUNDING is that of z in float64. MARGIN and ROUNDING are more than twice that.

Exactly, log1p(-u) is taken as log(w) * -u / (w - 1) with w = 1 - u, good to a few units in the last
place (Kahan; Goldberg 1991, "What every computer scientist should know about floating-point
arithmetic", theorem 4).
"""

from __future__ import annotations

import triton
import triton.language as tl

MARGIN, ROUNDING = tl.constexpr(1e-4), tl.constexpr(8.9e-16)


@triton.jit
def random_bits(key, o_id):
    """The upper 63 bits of the noise of ids, int64; `key` int64 holds the bits of a uint64
    (SplitMix64)."""
    G: tl.constexpr = 0x9E3779B97F4A7C15
    b_x = key.to(tl.uint64, bitcast=True) + (o_id.to(tl.uint64) + 1) * G
    b_x = (b_x ^ (b_x >> 30)) * 0xBF58476D1CE4E5B9
    b_x = (b_x ^ (b_x >> 27)) * 0x94D049BB133111EB
    return ((b_x ^ (b_x >> 31)) >> 1).to(tl.int64, bitcast=True)


@triton.jit
def exact_noise(key, o_id):
    """-log(exponential noise) in float64."""
    u = (random_bits(key, o_id).to(tl.float64) + 0.5) * 1.0842021724855044e-19
    u = tl.minimum(u, 0.9999999999999999)
    w = 1.0 - u
    log = tl.where(w == 1.0, -u, tl.log(w) * u / (1.0 - w))
    return -tl.log(-log)


@triton.jit
def first_best(b_score, o_id, NONE: tl.constexpr):
    """(greatest score, lowest id that has it)."""
    best = tl.max(b_score, axis=0)
    return best, tl.min(tl.where(b_score == best, o_id, NONE), axis=0)


@triton.jit
def _arrivals(
    p_x, p_id, o_x, end, least, origin, per_nat, row_key, LISTED: tl.constexpr
):  # fmt: skip
    """(what E / exp(z) of ids is at least, times 2^32 exp(z of `origin`), in float32, infinite
    below `least`; the ids). `LISTED`: logits and ids are lists, otherwise a row and its places."""
    o_id = o_x
    if LISTED:
        o_id = tl.load(p_id + o_x, mask=o_x < end, other=0)
    b_x = tl.load(p_x + o_x, mask=o_x < end, other=float("-inf"))
    b_down = tl.where(b_x < least, float("inf"), origin - b_x) * per_nat
    b_high = (random_bits(row_key, o_id) >> 31).to(tl.uint32).to(tl.float32)
    b_least = tl.maximum(b_high, 2.3283064365386963e-10) * tl.exp2(b_down)
    return tl.where(b_least != b_least, 0.0, b_least), o_id


@triton.jit
def _score(p_row, i_id, heat, row_key):
    """The score of one id, float64; a NaN counts as infinite."""
    score = tl.load(p_row + i_id).to(tl.float64) / heat + exact_noise(row_key, i_id)
    return tl.where(score != score, float("inf"), score)


@triton.jit
def _better(p_row, b_arrival, o_id, near, heat, row_key, highest, i_best):
    """The better of (highest, i_best) and the ids that may arrive up to `near`; among equals the
    lowest id."""
    NONE: tl.constexpr = 0x7FFFFFFF
    left = (b_arrival <= near) & (b_arrival < float("inf")) & (o_id != i_best)
    for _ in range(0, tl.sum(left.to(tl.int32), axis=0)):
        i_next = tl.min(tl.where(left, o_id, NONE), axis=0)
        score = _score(p_row, i_next, heat, row_key)
        wins = (score > highest) | ((score == highest) & (i_next < i_best))
        i_best = tl.where(wins, i_next, i_best)
        highest = tl.maximum(score, highest)
        left = left & (o_id != i_next)
    return highest, i_best


@triton.jit
def span_winner(
    p_row, p_x, p_id, begin, end, heat, row_key, origin, least,
    LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(score float64, id) of the winner among the ids of the places from `begin` to below `end`
    whose logits are at least `least`; a NaN counts as infinite. (-Inf, begin) if no id there can
    beat one whose logit is `origin`, a finite number. `p_x` is the row, or, `LISTED`, logits in any
    order with their ids in `p_id`."""
    NONE: tl.constexpr = 0x7FFFFFFF
    per_nat = (1.4426950408889634 / heat).to(tl.float32)
    b_first = tl.full([TILE], float("inf"), tl.float32)
    b_second = tl.full([TILE], float("inf"), tl.float32)
    b_id = begin + tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        b_arrival, o_id = _arrivals(
            p_x, p_id, start + tl.arange(0, TILE), end, least, origin, per_nat, row_key, LISTED
        )
        sooner = b_arrival < b_first
        b_second = tl.minimum(b_second, tl.where(sooner, b_first, b_arrival))
        b_id = tl.where(sooner, o_id, b_id)
        b_first = tl.minimum(b_first, b_arrival)
    first = tl.min(b_first, axis=0)
    highest, i_best = heat * 0.0 + float("-inf"), begin
    if first < float("inf"):
        i_best = tl.min(tl.where(b_first == first, b_id, NONE), axis=0)
        highest = _score(p_row, i_best, heat, row_key)
        z = origin.to(tl.float64) / heat
        late = (z - highest) * 1.4426950408889634 + 32.0 + MARGIN + tl.abs(z) * ROUNDING
        near = tl.exp2(late.to(tl.float32))
        if tl.min(b_second, axis=0) <= near:
            for start in range(begin, end, TILE):
                b_arrival, o_id = _arrivals(
                    p_x, p_id, start + tl.arange(0, TILE), end, least, origin, per_nat, row_key,
                    LISTED,
                )  # fmt: skip
                highest, i_best = _better(
                    p_row, b_arrival, o_id, near, heat, row_key, highest, i_best
                )
        else:
            highest, i_best = _better(p_row, b_first, b_id, near, heat, row_key, highest, i_best)
    return highest, i_best


@triton.jit
def row_winner(
    p_row, p_score, p_best, p_counter, p_token, p_z, chunks, heat, highest, i_best,
    i_chunk, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Keeps a chunk's winner; the program that finishes the row's last chunk stores the row's."""
    NONE: tl.constexpr = 0x7FFFFFFF
    tl.store(p_score + i_chunk, highest)
    tl.store(p_best + i_chunk, i_best)
    tl.debug_barrier()
    if tl.atomic_add(p_counter, 1, sem="acq_rel") == chunks - 1:
        tl.store(p_counter, 0)
        o_c = tl.arange(0, CHUNKS)
        m_c = o_c < chunks
        b_top = tl.load(p_score + o_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
        b_best = tl.load(p_best + o_c, mask=m_c, other=NONE, cache_modifier=".cg")
        _best, i_token = first_best(b_top, b_best, NONE)
        tl.store(p_token, i_token.to(tl.int64))
        tl.store(p_z, tl.load(p_row + i_token).to(tl.float64) / heat)
