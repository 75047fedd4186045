"""Attention of rows with one query on Hopper: persistent programs, to which the TMA streams the KV
cache.

A program takes a run of tiles (triton_runs.py): some positions of a row, of HEADS KV heads that lie
beside each other in a block, so that a copy brings all of them at once. It has STAGES tiles on
their way at any time, whatever rows they belong to, and the first of them from before the kernel it
waits for has ended: only the newest position is written by that one. Keys and values are the rows
of the matrix instructions and queries their columns; what a query sees of other heads than its own
is masked, which costs less than taking heads apart. Where runs share a row, each leaves its sums,
and the program that comes last adds them up in their order, and those of the row's prefix
(triton_cascade.py).

Quantized values (triton_quantized.py) are dequantized on their way: keys between shared memory and
the matrix instruction, which takes them from registers, values into shared memory once more. Scales
go onto scores and weights; they are copied past the TMA, as far ahead as it is.

A row that verifies drafts has QUERIES queries at most, each of which sees up to its own position.

K KV heads, D head_dim, Q queries of a program (HEADS * QUERIES * GROUP, padded), ROWS positions and
heads of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.back.kernels.attention.gluon_columns import (
    causal,
    of_heads,
    of_row,
    query_pointers,
)
from headrace.back.kernels.attention.gluon_quantized import (
    dequantized,
    lanes,
    load_scales,
    mixed,
    paired,
)
from headrace.back.kernels.attention.gluon_softmax import softmax_weights, store_lse
from headrace.back.kernels.attention.triton_prefill_hopper import blocks_from
from headrace.back.kernels.attention.triton_quantized import PAIRS_UP
from headrace.back.kernels.triton.gluon import enter, thread_barrier


@gluon.jit
def _row(lengths, joins, i_row, POSITIONS: gl.constexpr, SHARED: gl.constexpr):
    """A row's length, the first position that is its own, and how many tiles it has."""
    length = gl.load(lengths + i_row)
    first = 0
    if SHARED:
        first = gl.load(joins + i_row * 4)
    return length, first, gl.cdiv(length - first, POSITIONS)


@gluon.jit
def _next(
    lengths, joins, i_row, tile, length, first, tiles, POSITIONS: gl.constexpr, SHARED: gl.constexpr
):  # fmt: skip
    """The same tile, or the first of the next row if this one has no such."""
    while tile >= tiles:
        i_row += 1
        tile = 0
        length, first, tiles = _row(lengths, joins, i_row, POSITIONS, SHARED)
    return i_row, tile, length, first, tiles


@gluon.jit
def _blocks(
    table, table_stride, i_row, start, length, BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr
):
    """The cache's blocks of the tile that begins at position `start`."""
    p_table = table + i_row.to(gl.int64) * table_stride
    last = (length - 1) // BLOCK_TOKENS
    return blocks_from(p_table, start // BLOCK_TOKENS, last, BLOCKS)


@gluon.jit
def _first_tiles(
    lengths, joins, table, table_stride, row, tile, length, first, tiles, units,
    BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    QUERIES: gl.constexpr,
):  # fmt: skip
    """Of the first STAGES tiles the blocks, and whether all of it is older than the QUERIES newest
    positions; and the tile after them."""
    POSITIONS: gl.constexpr = BLOCKS * BLOCK_TOKENS
    waiting = ()
    old = ()
    for stage in gl.static_range(STAGES):
        if stage < units:
            row, tile, length, first, tiles = _next(
                lengths, joins, row, tile, length, first, tiles, POSITIONS, SHARED
            )
        start = first + tile * POSITIONS
        blocks = _blocks(table, table_stride, row, start, length, BLOCK_TOKENS, BLOCKS)
        waiting += (blocks,)
        old += (start + POSITIONS <= length - QUERIES,)
        tile += 1
    if units > STAGES:
        row, tile, length, first, tiles = _next(
            lengths, joins, row, tile, length, first, tiles, POSITIONS, SHARED
        )
    return waiting, old, row, tile, length, first, tiles


@gluon.jit
def _load(
    cache, blocks, i_head, stage, keys, values, ready,
    KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Asks for a tile's keys and values."""
    if len(cache.block_shape) == 3:
        _load_quantized(cache, blocks, i_head, stage, keys, values, ready, KV_HEADS, BLOCKS)
    else:
        _load_rows(
            cache, blocks, i_head, stage, keys, values, ready, KV_HEADS, BLOCK_TOKENS, BLOCKS
        )


@gluon.jit
def _load_quantized(
    cache, blocks, i_head, stage, keys, values, ready, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr
):
    """`keys` and `values`: [stages * BLOCKS, heads, tokens of a block, D]."""
    SIZE: gl.constexpr = cache.block_shape[0] * cache.block_shape[1] * cache.block_shape[2]
    mbarrier.expect(ready.index(stage), BLOCKS * SIZE * 2)
    for i in gl.static_range(BLOCKS):
        head = blocks[i] * (2 * KV_HEADS) + i_head
        place = stage * BLOCKS + i
        tma.async_copy_global_to_shared(cache, [head, 0, 0], ready.index(stage), keys.index(place))
        tma.async_copy_global_to_shared(
            cache, [head + KV_HEADS, 0, 0], ready.index(stage), values.index(place)
        )


@gluon.jit
def _load_rows(
    cache, blocks, i_head, stage, keys, values, ready,
    KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """`keys` and `values`: [stages, rows of a tile, D]."""
    BOX: gl.constexpr = cache.block_shape[0]
    mbarrier.expect(ready.index(stage), BLOCKS * BOX * cache.block_shape[1] * 4)
    for i in gl.static_range(BLOCKS):
        row = (blocks[i] * (2 * KV_HEADS) + i_head) * BLOCK_TOKENS
        tma.async_copy_global_to_shared(
            cache, [row, 0], ready.index(stage), keys.index(stage).slice(i * BOX, BOX, 0)
        )
        tma.async_copy_global_to_shared(
            cache, [row + KV_HEADS * BLOCK_TOKENS, 0], ready.index(stage),
            values.index(stage).slice(i * BOX, BOX, 0),
        )  # fmt: skip


@gluon.jit
def _load_scales(
    scales, blocks, i_head, stage, own, wanted, D: gl.constexpr, KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """Asks for the scales of a tile's keys and values, if wanted."""
    BOX: gl.constexpr = HEADS * BLOCK_TOKENS
    o_m = gl.arange(0, own.shape[1], layout=gl.BlockedLayout([1], [32], [4], [0]))
    b_block = gl.zeros_like(o_m)
    for i in gl.static_range(len(blocks)):
        b_block = gl.where(o_m // BOX == i, blocks[i], b_block)
    b_head = i_head + o_m % BOX // BLOCK_TOKENS
    load_scales(
        scales, b_block, b_head, o_m % BLOCK_TOKENS, own, stage, wanted, D, KV_HEADS, BLOCK_TOKENS
    )


@gluon.jit
def _load_first(
    cache, scales, waiting, old, OLD: gl.constexpr, units, i_head, keys, values, own, ready,
    KV_HEADS: gl.constexpr, HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, QUANTIZED: gl.constexpr,
):  # fmt: skip
    """Asks for those of the first tiles that are old or, if not OLD, for the others, and for their
    scales."""
    for stage in gl.static_range(STAGES):
        wanted = (stage < units) & (old[stage] == OLD)
        if wanted:
            _load(
                cache, waiting[stage], i_head, stage, keys, values, ready,
                KV_HEADS, BLOCK_TOKENS, BLOCKS,
            )  # fmt: skip
        if QUANTIZED is not None:
            _load_scales(
                scales, waiting[stage], i_head, stage, own, wanted, cache.block_shape[2],
                KV_HEADS, HEADS, BLOCK_TOKENS,
            )  # fmt: skip


@gluon.jit
def _clear(
    tile, seen, BOX: gl.constexpr, BLOCK_TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Zeroes the values of positions from `seen` on: what lies there was never written, and 0 * NaN
    is NaN."""
    o_m = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    b_v = tile.load(LAYOUT)
    m_v = (o_m // BOX * BLOCK_TOKENS + o_m % BLOCK_TOKENS < seen)[:, None]
    tile.store(gl.where(m_v, b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _added(
    b_acc, b_sum, b_max, p_sums, p_max, p_sum, num_splits, step, back, m_q, CHUNK: gl.constexpr
):  # fmt: skip
    """Adds splits, CHUNK of them asked for at once: p_sums [D, Q], p_max and p_sum [Q] point at the
    first, the others are `step` numbers behind each other, less `back`."""
    for first in range(0, num_splits, CHUNK):
        sums, maxima, totals = (), (), ()
        for i in gl.static_range(CHUNK):
            m_i = m_q & (first + i < num_splits)
            at = (first + i) * step - gl.where(first + i > 0, back, 0)
            sums += (gl.load(p_sums + at, mask=m_i[None, :], other=0.0, cache_modifier=".cg"),)
            maxima += (gl.load(p_max + at, mask=m_i, other=float("-inf"), cache_modifier=".cg"),)
            totals += (gl.load(p_sum + at, mask=m_i, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(CHUNK):
            b_higher = gl.maximum(b_max, maxima[i])
            b_base = gl.where(b_higher == float("-inf"), 0.0, b_higher)
            b_shrink = gl.exp2(b_max - b_base)
            b_weight = gl.exp2(maxima[i] - b_base)
            b_sum = b_sum * b_shrink + totals[i] * b_weight
            b_acc = b_acc * b_shrink[None, :] + sums[i] * b_weight[None, :]
            b_max = b_higher
    return b_acc, b_sum, b_max


@gluon.jit
def _attend_tile(
    b_acc, b_sums, b_max, queries, keys, values, weights, m_own, o_position, seen, o_back, factor,
    BOX: gl.constexpr, BLOCK_TOKENS: gl.constexpr, S_LAYOUT: gl.constexpr, ROW: gl.constexpr,
    QUERIES: gl.constexpr,
):  # fmt: skip
    """Adds a tile, of which `seen` positions hold something: sums [D, Q], weights of each position
    and head [ROWS, Q], maxima [Q]."""
    ROWS: gl.constexpr = keys.shape[0]
    Q: gl.constexpr = queries.shape[0]
    if seen < ROWS // BOX * BLOCK_TOKENS:
        _clear(values, seen, BOX, BLOCK_TOKENS, ROW)
    b_s = gl.zeros([ROWS, Q], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(keys, queries.permute((1, 0)), b_s, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=[b_s]) * factor
    b_s = gl.where(causal(m_own, o_position, seen, o_back, QUERIES), b_s, float("-inf"))
    b_p, b_shrink, b_higher = softmax_weights(b_s, b_max, 1.0, True, 0)
    weights.store(b_p.to(keys.dtype))
    fence_async_shared()
    thread_barrier()
    b_acc = warpgroup_mma(
        values.permute((1, 0)), weights, b_acc * b_shrink[None, :], is_async=True
    )  # fmt: skip
    b_sums = b_sums * b_shrink[None, :] + b_p
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    return b_acc, b_sums, b_higher


@gluon.jit
def _attend_quantized(
    b_acc, b_sums, b_max, queries, keys, values, wide, weights, k_scales, v_scales, m_own,
    o_position, seen, o_back, factor, S_LAYOUT: gl.constexpr, LANES: gl.constexpr,
    ROW: gl.constexpr, UP: gl.constexpr, QUANTIZED: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """The same of a quantized tile, with its scales: they are numbers wherever they lie. The
    columns of `queries` are mixed, and queries and sums are UP times too large or too small."""
    ROWS: gl.constexpr = keys.shape[0]
    Q: gl.constexpr = queries.shape[0]
    FIRST: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    b_k = gl.convert_layout(mixed(dequantized(keys.load(LANES), QUANTIZED)), FIRST)
    b_s = gl.zeros([ROWS, Q], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(b_k, queries.permute((1, 0)), b_s, use_acc=False, is_async=True)
    wide.store(dequantized(values.load(ROW), QUANTIZED))
    m_m = o_position < seen
    b_s, b_k = warpgroup_mma_wait(0, deps=[b_s, b_k])
    b_keys = k_scales.load(gl.SliceLayout(1, S_LAYOUT))
    b_s = b_s * (b_keys * (factor * UP))[:, None]
    b_s = gl.where(causal(m_own, o_position, seen, o_back, QUERIES), b_s, float("-inf"))
    b_p, b_shrink, b_higher = softmax_weights(b_s, b_max, 1.0, True, 0)
    b_values = v_scales.load(gl.SliceLayout(1, S_LAYOUT))
    b_scaled = b_p * gl.where(m_m, b_values * UP, 0.0)[:, None]
    weights.store(b_scaled.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    b_acc = warpgroup_mma(wide.permute((1, 0)), weights, b_acc * b_shrink[None, :], is_async=True)
    b_sums = b_sums * b_shrink[None, :] + b_p
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    return b_acc, b_sums, b_higher


@gluon.jit
def _store_queries(queries, p_q, m_q, QUANTIZED: gl.constexpr):
    """A row's queries to shared memory, for a quantized cache in the order of its columns."""
    b_q = gl.load(p_q, mask=m_q, other=0.0)
    if QUANTIZED is not None:
        if QUANTIZED == "fp8":
            b_q = paired(b_q * PAIRS_UP)
        b_q = mixed(b_q)
    queries.store(b_q)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _gathered(
    b_acc, b_sum, b_max, partial, p_counter, p_sharers, i_run, i_share, tile, o_d, o_q, m_q,
    SHARES: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leaves what is this run's of a row; for the run that comes last all runs' sums, and whether
    it is that."""
    D: gl.constexpr = b_acc.shape[0]
    Q: gl.constexpr = b_acc.shape[1]
    SIZE: gl.constexpr = Q * (D + 2)
    owner = gl.load(p_sharers)
    sharers = gl.load(p_sharers + 1)
    place = (i_run * SHARES + i_share) * 2 + (tile == 0).to(gl.int32)
    p_mine = partial + place.to(gl.int64) * SIZE
    gl.store(p_mine + o_q[None, :] * D + o_d[:, None], b_acc)
    gl.store(p_mine + Q * D + o_q, b_max)
    gl.store(p_mine + Q * D + Q + o_q, b_sum)
    thread_barrier()
    done = gl.atomic_add(p_counter, 1, sem="acq_rel") == sharers - 1
    if done:
        gl.store(p_counter, 0)
        b_sum = gl.zeros([Q], gl.float32, gl.SliceLayout(0, S_LAYOUT))
        b_max = gl.full([Q], float("-inf"), gl.float32, gl.SliceLayout(0, S_LAYOUT))
        b_acc = gl.zeros([D, Q], gl.float32, S_LAYOUT)
        p_one = partial + ((owner * SHARES + i_share) * 2 + 1).to(gl.int64) * SIZE
        p_sums = p_one + o_q[None, :] * D + o_d[:, None]
        p_max = p_one + Q * D + o_q
        b_acc, b_sum, b_max = _added(
            b_acc, b_sum, b_max, p_sums, p_max, p_max + Q, sharers, 2 * SHARES * SIZE, SIZE,
            m_q, 64 // Q,
        )  # fmt: skip
    return b_acc, b_sum, b_max, done


@gluon.jit
def _with_prefix(
    b_acc, b_sum, b_max, p_join, prefix, i_head, o_d, o_q, m_q,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PREFIX_M: gl.constexpr,
):  # fmt: skip
    """Adds what triton_cascade.py left of the row's prefix."""
    D: gl.constexpr = b_acc.shape[0]
    Q: gl.constexpr = b_acc.shape[1]
    LANE: gl.constexpr = PREFIX_M * (D + 2)
    o_lane = gl.load(p_join + 3) * GROUP + o_q % GROUP
    at = (gl.load(p_join + 1) * KV_HEADS + i_head).to(gl.int64) * LANE
    p_head = prefix + at + (o_q // GROUP * LANE + o_lane)
    p_sums = p_head + o_lane * (D - 1)
    return _added(
        b_acc, b_sum, b_max, p_sums[None, :] + o_d[:, None], p_head + PREFIX_M * D,
        p_head + (PREFIX_M * D + PREFIX_M), gl.load(p_join + 2), KV_HEADS * LANE, 0, m_q, 64 // Q,
    )  # fmt: skip


@gluon.jit
def _finish(
    b_acc, b_sum, b_max, tile, last, tiles, p_sharers, row, i_run, i_share, i_head, p_out, lse,
    o_lse, partial, counters, joins, prefix, o_d, o_q, m_q, KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, PREFIX_M: gl.constexpr,
    S_LAYOUT: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Writes a row's result, if the tiles from `tile` to `last` are all of it or the last that were
    missing."""
    SHARES: gl.constexpr = KV_HEADS // HEADS
    done = (tile == 0) & (last == tiles)
    if (tile > 0) | (last < tiles):
        b_acc, b_sum, b_max, done = _gathered(
            b_acc, b_sum, b_max, partial, counters + row * SHARES + i_share, p_sharers, i_run,
            i_share, tile, o_d, o_q, m_q, SHARES, S_LAYOUT,
        )  # fmt: skip
    if done:
        if SHARED:
            b_acc, b_sum, b_max = _with_prefix(
                b_acc, b_sum, b_max, joins + row * 4, prefix, i_head, o_d, o_q, m_q, KV_HEADS,
                GROUP, PREFIX_M,
            )  # fmt: skip
        b_out = (b_acc / b_sum[None, :]).to(p_out.dtype.element_ty)
        gl.store(p_out, b_out, mask=m_q[None, :])
        if LSE:
            store_lse(lse + o_lse, b_max, b_sum, m_q)


@gluon.jit(do_not_specialize=["table_stride"])
def decode_hopper_kernel(
    cache, scales, q, out, lse, runs, starts, lengths, joins, table, partial, prefix, counters,
    q_token_stride, q_head_stride, out_token_stride, table_stride, factor, KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, Q: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    PREFIX_M: gl.constexpr, QUANTIZED: gl.constexpr, LSE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Grid (K / HEADS, runs). `cache`: descriptor of the cache as rows of D, HEADS heads of a block
    at a time; if QUANTIZED ("int8" or "fp8") as heads of a block, int8, and `scales` is the same
    memory as float32. `factor`: scale * log2(e); `partial` float32 [runs, K / HEADS, 2, Q * (D +
    2)]. Rows have 1 to QUERIES queries. What is read before the wait was written before the kernel
    that this one waits for (enter_late): all but the newest positions."""
    D: gl.constexpr = cache.block_shape[len(cache.block_shape) - 1]
    BOX: gl.constexpr = HEADS * BLOCK_TOKENS
    ROWS: gl.constexpr = BLOCKS * BOX
    WIDE: gl.constexpr = out.dtype.element_ty
    POSITIONS: gl.constexpr = BLOCKS * BLOCK_TOKENS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q, D], WIDE)
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q, ROWS], WIDE)
    UP: gl.constexpr = PAIRS_UP if QUANTIZED == "fp8" else 1.0
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if QUANTIZED is not None:
        STORED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.int8)
        V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], WIDE)
        V_ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
        LANES: gl.constexpr = lanes(ROWS, D)
        SLOTS: gl.constexpr = [STAGES * BLOCKS, HEADS, BLOCK_TOKENS, D]
        key_slots = gl.allocate_shared_memory(gl.int8, SLOTS, cache.layout)
        value_slots = gl.allocate_shared_memory(gl.int8, SLOTS, cache.layout)
        keys = key_slots._reinterpret(gl.int8, [STAGES, ROWS, D], STORED_LAYOUT)
        values = value_slots._reinterpret(gl.int8, [STAGES, ROWS, D], STORED_LAYOUT)
        wide = gl.allocate_shared_memory(WIDE, [ROWS, D], V_SHARED)
        own = gl.allocate_shared_memory(
            gl.float32, [STAGES * 2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    else:
        keys = gl.allocate_shared_memory(WIDE, [STAGES, ROWS, D], cache.layout)
        values = gl.allocate_shared_memory(WIDE, [STAGES, ROWS, D], cache.layout)
        key_slots, value_slots, own = keys, values, ready
    queries = gl.allocate_shared_memory(WIDE, [Q, D], Q_SHARED)
    weights = gl.allocate_shared_memory(WIDE, [Q, ROWS], W_SHARED).permute((1, 0))
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    i_share, i_run = gl.program_id(0), gl.program_id(1)
    i_head = i_share * HEADS
    p_run = runs + i_run * 12
    row = gl.load(p_run)
    tile = gl.load(p_run + 1)
    units = gl.load(p_run + 2)
    if (units == 0) & (i_run > 0):
        return  # run 0 waits, so that this kernel ends after the one before
    length = gl.load(p_run + 7)
    first = gl.load(p_run + 8)
    token = gl.load(p_run + 9).to(gl.int64)
    tiles = gl.cdiv(length - first, POSITIONS)

    waiting, old, a_row, a_tile, a_length, a_first, a_tiles = _first_tiles(
        lengths, joins, table, table_stride, row, tile, length, first, tiles, units,
        BLOCK_TOKENS, BLOCKS, STAGES, SHARED, QUERIES,
    )  # fmt: skip
    start = a_first + a_tile * POSITIONS
    a_blocks = _blocks(table, table_stride, a_row, start, a_length, BLOCK_TOKENS, BLOCKS)
    _load_first(
        cache, scales, waiting, old, 1, units, i_head, key_slots, value_slots, own, ready,
        KV_HEADS, HEADS, BLOCK_TOKENS, BLOCKS, STAGES, QUANTIZED,
    )  # fmt: skip
    enter(DEPENDENT)
    _load_first(
        cache, scales, waiting, old, 0, units, i_head, key_slots, value_slots, own, ready,
        KV_HEADS, HEADS, BLOCK_TOKENS, BLOCKS, STAGES, QUANTIZED,
    )  # fmt: skip
    if QUANTIZED is not None:
        async_copy.wait_group(STAGES - 1)

    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    o_q = gl.arange(0, Q, layout=gl.SliceLayout(0, S_LAYOUT))
    o_position = o_m // BOX * BLOCK_TOKENS + o_m % BLOCK_TOKENS
    m_q = o_q < HEADS * GROUP * QUERIES
    m_own = (o_m % BOX // BLOCK_TOKENS)[:, None] == (o_q // (GROUP * QUERIES))[None, :]
    o_head, o_query = of_heads(o_q, GROUP, QUERIES)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(1, S_LAYOUT))
    if QUANTIZED == "fp8":
        o_d = (o_d & ~3) | (o_d & 1) << 1 | (o_d & 2) >> 1
    p_q, o_load, m_load = query_pointers(
        q, i_head, q_token_stride, q_head_stride, HEADS, GROUP, QUERIES, Q, D, ROW
    )
    count = 0
    while count < units:
        begin = count
        last = gl.minimum(tiles, tile + units - count)
        m_mine, m_taken, o_back = of_row(starts, row, token, m_q, m_load, o_query, o_load, QUERIES)
        _store_queries(queries, p_q + token * q_token_stride, m_taken[:, None], QUANTIZED)
        b_max = gl.full([Q], float("-inf"), gl.float32, gl.SliceLayout(0, S_LAYOUT))
        b_sums = gl.zeros([ROWS, Q], gl.float32, S_LAYOUT)
        b_acc = gl.zeros([D, Q], gl.float32, S_LAYOUT)
        for i_tile in range(tile, last):
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            seen = length - first - i_tile * POSITIONS
            if QUANTIZED is not None:
                b_acc, b_sums, b_max = _attend_quantized(
                    b_acc, b_sums, b_max, queries, keys.index(slot), values.index(slot), wide,
                    weights, own.index(slot * 2), own.index(slot * 2 + 1), m_own, o_position, seen,
                    o_back, factor, S_LAYOUT, LANES, V_ROW, UP, QUANTIZED, QUERIES,
                )  # fmt: skip
                async_copy.wait_group(STAGES - 2)
            else:
                b_acc, b_sums, b_max = _attend_tile(
                    b_acc, b_sums, b_max, queries, keys.index(slot), values.index(slot), weights,
                    m_own, o_position, seen, o_back, factor, BOX, BLOCK_TOKENS, S_LAYOUT, ROW,
                    QUERIES,
                )  # fmt: skip
            thread_barrier()
            count += 1
            if QUANTIZED is not None:
                _load_scales(
                    scales, a_blocks, i_head, slot, own, count + STAGES <= units,
                    D, KV_HEADS, HEADS, BLOCK_TOKENS,
                )  # fmt: skip
            if count + STAGES <= units:
                _load(
                    cache, a_blocks, i_head, slot, key_slots, value_slots, ready,
                    KV_HEADS, BLOCK_TOKENS, BLOCKS,
                )  # fmt: skip
                if count + STAGES < units:
                    a_row, a_tile, a_length, a_first, a_tiles = _next(
                        lengths, joins, a_row, a_tile + 1, a_length, a_first, a_tiles,
                        POSITIONS, SHARED,
                    )  # fmt: skip
                    start = a_first + a_tile * POSITIONS
                    a_blocks = _blocks(
                        table, table_stride, a_row, start, a_length, BLOCK_TOKENS, BLOCKS
                    )
        o_token = token + o_query
        p_out = out + (o_token * out_token_stride + (i_head * GROUP + o_head) * D)[None, :]
        _finish(
            b_acc * UP, gl.sum(b_sums, axis=0), b_max, tile, last, tiles,
            p_run + gl.where(begin == 0, 3, 5), row, i_run, i_share, i_head, p_out + o_d[:, None],
            lse, (o_token * KV_HEADS + i_head) * GROUP + o_head, partial, counters, joins, prefix,
            o_d, o_q, m_mine, KV_HEADS, HEADS, GROUP, SHARED, PREFIX_M, S_LAYOUT, LSE,
        )  # fmt: skip
        if count < units:
            row, tile, length, first, tiles = _next(
                lengths, joins, row, last, length, first, tiles, POSITIONS, SHARED
            )
            token = gl.load(starts + row).to(gl.int64)
