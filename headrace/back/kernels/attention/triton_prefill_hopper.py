"""Attention of rows with many queries on Hopper: the TMA brings blocks of the cache, the matrix
units read them from shared memory.

Programs are persistent: each takes one tile after the other from a list (triton_tiles.py), the
longest first. Three groups of warps share it: one asks the TMA for keys and values, block by block
through the table, as far ahead as there is room; two attend, each for half of the tile's queries,
and take turns on the matrix units by themselves. Each of the two starts the scores of the next
positions before it weighs the values of these, so that the exponentials run beside a product (Shah
et al. 2024, "FlashAttention-3", section 3). Positions are taken from the last ones back: only the
first tiles of positions need masks, and with windows or chunks (`WINDOW`, as `first_seen` of
triton_rows.py takes it) the last ones too.

H query heads, K KV heads, D head_dim, N positions of a tile. 64 query-head pairs a group of warps:
Q = 64 // GROUP queries with all heads that share a KV head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.back.kernels.attention.gluon_quantized import paired
from headrace.back.kernels.attention.gluon_rows import first_seen, seen_blocks
from headrace.back.kernels.attention.gluon_softmax import softmax_weights, store_lse
from headrace.back.kernels.attention.triton_quantized import PAIRS_UP
from headrace.back.kernels.triton.gluon import thread_barrier

PAIRS = gl.constexpr(64)
"""Query-head pairs of a group of warps: rows of one matrix instruction."""


@gluon.jit
def item_of(i_round):
    """The piece of work of a round: there and back, so that every program gets as much as any
    other."""
    programs = gl.num_programs(0)
    i_program = gl.program_id(0)
    place = gl.where(i_round % 2 == 0, i_program, programs - 1 - i_program)
    return i_round * programs + place


@gluon.jit
def blocks_from(p_table, first, last, BLOCKS: gl.constexpr):
    """The cache's blocks of a tile, from a row's `first` on; behind its `last` that one again."""
    blocks = ()
    for i in gl.static_range(BLOCKS):
        blocks += (gl.load(p_table + gl.minimum(first + i, last)),)
    return blocks


@gluon.jit
def _fetch(
    cache, tiles, table, table_stride, keys, values, k_ready, k_free, v_ready, v_free,
    KV_HEADS: gl.constexpr, N: gl.constexpr, BLOCK_TOKENS: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Asks for the keys and values of every tile, in the order they are taken."""
    BLOCKS: gl.constexpr = N // BLOCK_TOKENS
    D: gl.constexpr = cache.block_shape[1]
    items = gl.load(tiles) * KV_HEADS
    count = 0
    for i_round in range(0, gl.cdiv(items, gl.num_programs(0))):
        i_item = item_of(i_round)
        if i_item < items:
            i_head = i_item % KV_HEADS
            p_tile = tiles + (i_item // KV_HEADS + 1) * 8
            p_table = table + gl.load(p_tile).to(gl.int64) * table_stride
            end = gl.load(p_tile + 5)
            last_block = (end - 1) // BLOCK_TOKENS
            num_tiles = gl.cdiv(end, N)
            begin = first_seen(gl.load(p_tile + 3), WINDOW)
            lowest_block = begin // BLOCK_TOKENS
            for i_back in range(0, num_tiles - begin // N):
                first_block = (num_tiles - 1 - i_back) * BLOCKS
                blocks = seen_blocks(p_table, first_block, lowest_block, last_block, BLOCKS)
                stage = count % STAGES
                phase = (count // STAGES & 1) ^ 1
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_ready.index(stage), N * D * 2)
                for i in gl.static_range(BLOCKS):
                    row = (blocks[i] * (2 * KV_HEADS) + i_head) * BLOCK_TOKENS
                    tma.async_copy_global_to_shared(
                        cache, [row, 0], k_ready.index(stage),
                        keys.index(stage).slice(i * BLOCK_TOKENS, BLOCK_TOKENS, 0),
                    )  # fmt: skip
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_ready.index(stage), N * D * 2)
                for i in gl.static_range(BLOCKS):
                    row = (blocks[i] * (2 * KV_HEADS) + KV_HEADS + i_head) * BLOCK_TOKENS
                    tma.async_copy_global_to_shared(
                        cache, [row, 0], v_ready.index(stage),
                        values.index(stage).slice(i * BLOCK_TOKENS, BLOCK_TOKENS, 0),
                    )  # fmt: skip
                count += 1


@gluon.jit
def _clear(values, first, N: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeroes the values of positions `first` .. N: what lies there was never written, and 0 * NaN
    is NaN. Both groups of warps do it, with the same result."""
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(N // ROWS):
        if (i + 1) * ROWS > first:
            chunk = values.slice(i * ROWS, ROWS, 0)
            b_v = chunk.load(LAYOUT)
            seen = (i * ROWS + o_n < first)[:, None]
            chunk.store(gl.where(seen, b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _clear_before(values, until, N: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeroes the values of a tile's positions below `until`, as `_clear` does those behind: other
    blocks stand there, whose unused places may hold anything."""
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(N // ROWS):
        if i * ROWS < until:
            chunk = values.slice(i * ROWS, ROWS, 0)
            b_v = chunk.load(LAYOUT)
            seen = (i * ROWS + o_n >= until)[:, None]
            chunk.store(gl.where(seen, b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _weigh(
    b_s, b_max, factor, inner, b_position, start, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of scores against a new maximum, what the old sums shrink by, and the maximum. With
    SOFTCAP, 2: by the unit that approximates it, scores become tanh(scores * inner), and `factor`
    is the cap * log2(e)."""
    if SOFTCAP == 2:  # as near as bfloat16 tells
        b_s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [b_s * inner], dtype=gl.float32, is_pure=True, pack=1
        )
    elif SOFTCAP == 1:
        b_s = 1.0 - 2.0 / (gl.exp2(b_s * (inner * 2.8853900817779268)) + 1.0)
    if MASKED:
        o_n = start + gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        m_s = o_n[None, :] <= b_position[:, None]
        if WINDOW != 0:
            m_s = m_s & (o_n[None, :] >= first_seen(b_position, WINDOW)[:, None])
        b_s = gl.where(m_s, b_s, float("-inf"))
    return softmax_weights(b_s, b_max, factor, MASKED, 1)


@gluon.jit
def _step(
    b_acc, b_p, b_max, b_sum, count, start, queries, keys, values, k_ready, k_free, v_ready, v_free,
    b_position, factor, inner, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Starts the scores of the positions from `start`, weighs the values of those before with
    `b_p`, and makes the weights of the new ones meanwhile."""
    stage = count % STAGES
    mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
    zeros = gl.zeros([PAIRS, N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    before = (count - 1) % STAGES
    mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
    weighed = warpgroup_mma(b_p, values.index(before), b_acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[scores])
    b_next, b_shrink, b_max = _weigh(
        b_s, b_max, factor, inner, b_position, start, MASKED, WINDOW, SOFTCAP, S_LAYOUT
    )
    b_sum = b_sum * b_shrink + gl.sum(b_next, axis=1)
    thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    b_acc = warpgroup_mma_wait(0, deps=[weighed])
    thread_barrier()
    mbarrier.arrive(v_free.index(before), count=1)
    b_acc = b_acc * gl.convert_layout(b_shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    b_p = gl.convert_layout(b_next.to(b_p.dtype), P_LAYOUT)
    return b_acc, b_p, b_max, b_sum


@gluon.jit
def attend(
    HALF: gl.constexpr, q, out, lse, sinks, tiles, queries, keys, values, k_ready, k_free, v_ready,
    v_free, q_token_stride, q_head_stride, out_token_stride, factor, inner, GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Attends for one half of every tile's queries. PAIRED: keys and values were e4m3 values
    (triton_quantized.py). `inner`: see `_weigh`."""
    D: gl.constexpr = queries.shape[2]
    Q: gl.constexpr = PAIRS // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = queries.dtype
    o_m = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, ROW))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, ROW))
    o_pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, S_LAYOUT))
    mine = queries.index(HALF)
    items = gl.load(tiles) * KV_HEADS
    count = 0
    for i_round in range(0, gl.cdiv(items, gl.num_programs(0))):
        i_item = item_of(i_round)
        if i_item < items:
            i_head = i_item % KV_HEADS
            p_tile = tiles + (i_item // KV_HEADS + 1) * 8
            token = gl.load(p_tile + 1).to(gl.int64)
            num_queries = gl.load(p_tile + 2)
            first_position = gl.load(p_tile + 3)
            length = gl.load(p_tile + 4)
            end = gl.load(p_tile + 5)
            num_tiles = gl.cdiv(end, N)

            o_query = HALF * Q + o_m // GROUP
            m_m = (o_m < Q * GROUP) & (o_query < num_queries)
            o_head = i_head * GROUP + o_m % GROUP
            p_q = q + (token + o_query) * q_token_stride + o_head * q_head_stride
            b_q = gl.load(p_q[:, None] + o_d[None, :], mask=m_m[:, None], other=0.0)
            if PAIRED:
                b_q = paired(b_q * PAIRS_UP)
            mine.store(b_q)
            fence_async_shared()
            thread_barrier()

            lowest = first_position + HALF * Q
            first_tile = first_seen(first_position, WINDOW) // N
            b_position = gl.minimum(lowest + o_pair // GROUP, end - 1)
            start = (num_tiles - 1) * N
            stage = count % STAGES
            mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
            zeros = gl.zeros([PAIRS, N], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(
                mine, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            b_s = warpgroup_mma_wait(0, deps=[scores])
            thread_barrier()
            mbarrier.arrive(k_free.index(stage), count=1)
            b_max = gl.full([PAIRS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            b_w, _, b_max = _weigh(
                b_s, b_max, factor, inner, b_position, start, True, WINDOW, SOFTCAP, S_LAYOUT
            )
            b_sum = gl.sum(b_w, axis=1)
            b_p = gl.convert_layout(b_w.to(dtype), P_LAYOUT)
            b_acc = gl.zeros([PAIRS, D], gl.float32, O_LAYOUT)
            if length < start + N:
                mbarrier.wait(v_ready.index(stage), count // STAGES & 1)
                _clear(values.index(stage), length - start, N, 16, ROW)
            count += 1

            seen_by_all = gl.minimum((lowest + 1) // N, num_tiles - 1)
            if WINDOW != 0:
                seen_by_all = gl.maximum(seen_by_all, first_tile)
            for i_tile in range(1, num_tiles - seen_by_all):
                b_acc, b_p, b_max, b_sum = _step(
                    b_acc, b_p, b_max, b_sum, count, start - i_tile * N, mine, keys, values,
                    k_ready, k_free, v_ready, v_free, b_position, factor, inner, STAGES, True,
                    WINDOW, SOFTCAP, S_LAYOUT, O_LAYOUT, P_LAYOUT, N,
                )  # fmt: skip
                count += 1
            whole_from = 0
            if WINDOW != 0:  # the first tile that all queries of this half see whole
                highest = gl.minimum(lowest + Q - 1, end - 1)
                whole_from = gl.minimum(gl.cdiv(first_seen(highest, WINDOW), N), seen_by_all)
            for _ in range(whole_from, seen_by_all):
                b_acc, b_p, b_max, b_sum = _step(
                    b_acc, b_p, b_max, b_sum, count, 0, mine, keys, values,
                    k_ready, k_free, v_ready, v_free, b_position, factor, inner, STAGES, False,
                    WINDOW, SOFTCAP, S_LAYOUT, O_LAYOUT, P_LAYOUT, N,
                )  # fmt: skip
                count += 1
            if WINDOW != 0:
                for i_tile in range(0, whole_from - first_tile):
                    b_acc, b_p, b_max, b_sum = _step(
                        b_acc, b_p, b_max, b_sum, count, (whole_from - 1 - i_tile) * N, mine, keys,
                        values, k_ready, k_free, v_ready, v_free, b_position, factor, inner, STAGES,
                        True, WINDOW, SOFTCAP, S_LAYOUT, O_LAYOUT, P_LAYOUT, N,
                    )  # fmt: skip
                    count += 1

            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
            if WINDOW != 0:
                hidden = first_seen(first_position, WINDOW) - first_tile * N
                if hidden > 0:
                    _clear_before(values.index(before), hidden, N, 16, ROW)
            weighed = warpgroup_mma(b_p, values.index(before), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=[weighed])
            thread_barrier()
            mbarrier.arrive(v_free.index(before), count=1)
            if SINKS:
                b_sink = gl.load(sinks + i_head * GROUP + o_pair % GROUP) * 1.4426950408889634
                b_sum += gl.exp2(b_sink - b_max * factor)
            if LSE:
                o_pair_query = HALF * Q + o_pair // GROUP
                p_lse = lse + ((token + o_pair_query) * KV_HEADS + i_head) * GROUP + o_pair % GROUP
                m_pair = (o_pair < Q * GROUP) & (o_pair_query < num_queries)
                store_lse(p_lse, b_max * factor, b_sum, m_pair)
            b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, O_LAYOUT))
            b_acc = b_acc / b_total[:, None]
            if PAIRED:
                b_acc = b_acc * PAIRS_UP
            mine.store(b_acc.to(dtype))
            b_out = mine.load(ROW)
            if PAIRED:
                b_out = gl.convert_layout(paired(b_out), ROW)
            p_out = out + (token + o_query) * out_token_stride + o_head * D
            gl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_m[:, None])


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """What tells the two groups that attend of keys and of values that have come, and whoever
    brings them of places that both have left."""
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    return k_ready, k_free, v_ready, v_free


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_hopper_kernel(
    cache, q, out, lse, sinks, tiles, table, q_token_stride, q_head_stride, out_token_stride,
    table_stride, factor, inner,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """`cache`: descriptor of the cache as rows of D, a block of one head at a time; `factor`: from
    scores, or those that `_weigh` caps, to log 2."""
    D: gl.constexpr = cache.block_shape[1]
    keys = gl.allocate_shared_memory(cache.dtype, [STAGES, N, D], cache.layout)
    values = gl.allocate_shared_memory(cache.dtype, [STAGES, N, D], cache.layout)
    queries = gl.allocate_shared_memory(cache.dtype, [2, PAIRS, D], cache.layout)
    k_ready, k_free, v_ready, v_free = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend,
                (
                    gl.constexpr(0), q, out, lse, sinks, tiles, queries, keys, values, k_ready,
                    k_free, v_ready, v_free, q_token_stride, q_head_stride, out_token_stride,
                    factor, inner, GROUP, KV_HEADS, N, STAGES, False, WINDOW, SOFTCAP, SINKS, LSE,
                ),
            ),
            (
                attend,
                (
                    gl.constexpr(1), q, out, lse, sinks, tiles, queries, keys, values, k_ready,
                    k_free, v_ready, v_free, q_token_stride, q_head_stride, out_token_stride,
                    factor, inner, GROUP, KV_HEADS, N, STAGES, False, WINDOW, SOFTCAP, SINKS, LSE,
                ),
            ),
            (
                _fetch,
                (
                    cache, tiles, table, table_stride, keys, values, k_ready, k_free, v_ready,
                    v_free, KV_HEADS, N, BLOCK_TOKENS, STAGES, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
