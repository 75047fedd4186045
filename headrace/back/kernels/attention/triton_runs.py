"""How the work of a step's rows is dealt to persistent programs: runs of tiles, one row behind the
other.

All rows' tiles, in order, are cut into runs as long as each other. A cut that would fall near the
beginning or the end of a row is made there, so that fewer rows are shared: a longer run costs
nothing while other programs keep the memory busy. Runs whose cuts meet are empty.

Record i of a list is run i: its first row, its first tile within it, and how many tiles; then of
its first and of its last row each the first run that has a part of it, and how many have; and of
its first row the length, the first position that is its own, and the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_rows import pick, row_spans
from headrace.back.kernels.triton.grid import enter

RUN_FIELDS = 12


@triton.jit
def _moved(cut, b_until, b_tiles, slack):
    """A cut, or the end of a row that is at most `slack` tiles away."""
    here = (b_until > cut) & (b_until - b_tiles <= cut)
    start, end = pick(b_until - b_tiles, here), pick(b_until, here)
    moved = tl.where(end - cut <= slack, end, cut)
    moved = tl.where((cut - start <= slack) & (cut - start <= end - cut), start, moved)
    return tl.where(end > 0, moved, cut)


@triton.jit
def _slack(b_tiles, total, num_runs, NEAR: tl.constexpr):
    """By how many tiles a cut may be moved: up to half a run. If rows are alike, and whole rows
    leave no run with much more than the others, it is that half, so that hardly any row is shared.
    """
    rows = tl.sum((b_tiles > 0).to(tl.int32), axis=0).to(tl.int64)
    alike = tl.max(b_tiles, axis=0) * rows * 8 <= total.to(tl.int64) * 9
    even = tl.cdiv(rows, num_runs) * num_runs * 4 <= rows * 5
    half = total // num_runs // 2
    return tl.where(alike & even, half, tl.minimum(half, NEAR))


@triton.jit
def _store_sharers(p_first, start, end, total, num_runs, slack, RUNS: tl.constexpr):
    """Which runs have a part of the row of tiles `start` .. `end`: those between the cuts that stay
    inside it."""
    o_i = tl.arange(0, RUNS)
    b_cut = (o_i.to(tl.int64) * total // num_runs).to(tl.int32)
    inside = (o_i < num_runs) & (b_cut - start > slack) & (end - b_cut > slack)
    tl.store(p_first, tl.min(tl.where(inside, o_i, RUNS), axis=0) - 1)
    tl.store(p_first + 1, tl.sum(inside.to(tl.int32), axis=0) + 1)


@triton.jit(do_not_specialize=["num_rows", "most"])
def runs_kernel(
    starts,
    lengths,
    joins,
    runs,
    num_rows,
    most,
    QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    LEAST: tl.constexpr,
    NEAR: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (`most`, the runs at most); `runs` int32 [most, 12]. Tiles of POSITIONS, at least LEAST
    a run; cuts move by up to NEAR tiles, or to the next row in any case (_slack). Rows with up to
    QUERIES queries are dealt, no others; if SHARED, they begin behind their prefixes (`joins`:
    triton_cascade.py)."""
    i_run = tl.program_id(0)
    enter(DEPENDENT)
    o_r, b_queries, b_length, b_first = row_spans(starts, lengths, num_rows, 0, ROWS)
    if SHARED:
        b_first = tl.load(joins + o_r * 4, mask=o_r < num_rows, other=0)
    ours = (b_queries >= 1) & (b_queries <= QUERIES)
    b_tiles = tl.where(ours, tl.cdiv(b_length - b_first, POSITIONS), 0)
    b_until = tl.cumsum(b_tiles, axis=0)
    total = tl.sum(b_tiles, axis=0)
    num_runs = tl.minimum(most, tl.maximum(total // LEAST, 1))
    slack = _slack(b_tiles, total, num_runs, NEAR)
    i_first = tl.minimum(i_run, num_runs).to(tl.int64)
    i_next = tl.minimum(i_run + 1, num_runs).to(tl.int64)
    begin = _moved((i_first * total // num_runs).to(tl.int32), b_until, b_tiles, slack)
    end = _moved((i_next * total // num_runs).to(tl.int32), b_until, b_tiles, slack)
    i_row = tl.sum((b_until <= begin).to(tl.int32), axis=0)
    i_last = tl.sum((b_until < end).to(tl.int32), axis=0)
    row_end = pick(b_until, o_r == i_row)
    row_start = row_end - pick(b_tiles, o_r == i_row)
    last_end = pick(b_until, o_r == i_last)
    last_start = last_end - pick(b_tiles, o_r == i_last)
    p_run = runs + i_run * 12
    tl.store(p_run, tl.minimum(i_row, num_rows - 1))
    tl.store(p_run + 1, begin - row_start)
    tl.store(p_run + 2, end - begin)
    _store_sharers(p_run + 3, row_start, row_end, total, num_runs, slack, RUNS)
    _store_sharers(p_run + 5, last_start, last_end, total, num_runs, slack, RUNS)
    tl.store(p_run + 7, pick(b_length, o_r == i_row))
    tl.store(p_run + 8, pick(b_first, o_r == i_row))
    tl.store(p_run + 9, tl.load(starts + tl.minimum(i_row, num_rows - 1)))
