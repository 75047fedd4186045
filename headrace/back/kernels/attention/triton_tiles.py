"""The tiles of a step's long rows, made on the device once a step: which queries of which row, the
longest work first.

Tile i of the list is eight numbers, from 8 (i + 1) on: row, its first token, how many queries, the
position of the first, the row's KV length, and the position after the last query. The first number
of the list is how many there are. No sort is needed: the tiles of a row grow by steps that are
known, so every program counts how many go before its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_rows import pick, row_spans
from headrace.back.kernels.triton.grid import enter

TILE_FIELDS = 8


@triton.jit
def _longer(b_base, b_queries, b_tiles, end, QUERIES: tl.constexpr):
    """How many tiles of each row end after position `end`."""
    b_over = tl.maximum(end - b_base, 0) // QUERIES
    return tl.where(b_base + b_queries > end, tl.maximum(b_tiles - b_over, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def tiles_kernel(
    starts,
    lengths,
    tiles,
    num_rows,
    QUERIES: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles at most); `tiles` int32 [tiles at most + 1, 8]. Rows with fewer than MIN_QUERIES
    are left out."""
    i_tile = tl.program_id(0)
    enter(DEPENDENT)
    o_r, b_queries, b_length, _ = row_spans(starts, lengths, num_rows, 0, ROWS)
    b_queries = tl.where(b_queries >= MIN_QUERIES, b_queries, 0)
    b_tiles = tl.cdiv(b_queries, QUERIES)
    b_until = tl.cumsum(b_tiles, axis=0)
    total = tl.sum(b_tiles, axis=0)
    if i_tile == 0:
        tl.store(tiles, total)
    if i_tile >= total:
        return
    i_row = tl.sum((b_until <= i_tile).to(tl.int32), axis=0)
    here = o_r == i_row
    queries, length = pick(b_queries, here), pick(b_length, here)
    first = (i_tile - pick(b_until, here) + pick(b_tiles, here)) * QUERIES
    b_base = b_length - b_queries
    end = length - queries + tl.minimum(first + QUERIES, queries)
    b_longer = _longer(b_base, b_queries, b_tiles, end, QUERIES)
    b_equal = _longer(b_base, b_queries, b_tiles, end - 1, QUERIES) - b_longer
    place = tl.sum(b_longer + tl.where(o_r < i_row, b_equal, 0), axis=0)
    p_tile = tiles + (place + 1) * 8
    tl.store(p_tile, i_row)
    tl.store(p_tile + 1, tl.load(starts + i_row) + first)
    tl.store(p_tile + 2, tl.minimum(queries - first, QUERIES))
    tl.store(p_tile + 3, length - queries + first)
    tl.store(p_tile + 4, length)
    tl.store(p_tile + 5, end)
