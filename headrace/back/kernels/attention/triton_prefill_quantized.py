"""Attention of rows with many queries on Hopper over a quantized cache
(kernels/kv_write/quantized.py).

As triton_prefill_hopper.py, with one group of warps more: the TMA copies quantized values, and that
group makes bfloat16 of them, with their scales, where the two that attend look for keys and values.
A dequantized number is rounded once, as one of a bfloat16 cache is: its scale is split into two
bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headrace.back.kernels.attention.gluon_quantized import dequantized, load_scales
from headrace.back.kernels.attention.triton_prefill_hopper import (
    PAIRS,
    attend,
    barriers,
    blocks_from,
    item_of,
)
from headrace.back.kernels.attention.triton_quantized import PAIRS_UP, SCALED
from headrace.back.kernels.triton.gluon import thread_barrier

CHUNK = gl.constexpr(32)
"""Positions dequantized at once: few, as the registers belong to the groups that attend."""


@gluon.jit
def _work(
    tiles, table_stride, i_round,
    KV_HEADS: gl.constexpr, N: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """A round's work item: whether there is one, its KV head, where its row's table is, that row's
    last block, and how many tiles of positions there are."""
    i_item = item_of(i_round)
    live = i_item < gl.load(tiles) * KV_HEADS
    p_tile = tiles + (gl.where(live, i_item, 0) // KV_HEADS + 1) * 8
    at = gl.where(live, gl.load(p_tile), 0).to(gl.int64) * table_stride
    end = gl.where(live, gl.load(p_tile + 5), 1)
    return live, i_item % KV_HEADS, at, (end - 1) // BLOCK_TOKENS, gl.cdiv(end, N)


@gluon.jit
def _fetch(
    cache, tiles, table, table_stride, quantized, loaded, released,
    KV_HEADS: gl.constexpr, N: gl.constexpr, BLOCK_TOKENS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Copies the quantized keys of every tile, and then its values, in the order they are
    consumed."""
    BLOCKS: gl.constexpr = N // BLOCK_TOKENS
    SIZE: gl.constexpr = N * cache.block_shape[2]
    count = 0
    i_round = 0
    live, i_head, at, last_block, num_tiles = _work(
        tiles, table_stride, i_round, KV_HEADS, N, BLOCK_TOKENS
    )
    while live:
        for i_back in range(0, num_tiles):
            first_block = (num_tiles - 1 - i_back) * BLOCKS
            blocks = blocks_from(table + at, first_block, last_block, BLOCKS)
            for kind in gl.static_range(2):
                slot = count % SLOTS
                mbarrier.wait(released.index(slot), (count // SLOTS & 1) ^ 1)
                mbarrier.expect(loaded.index(slot), SIZE)
                for i in gl.static_range(BLOCKS):
                    head = (blocks[i] * 2 + kind) * KV_HEADS + i_head
                    tma.async_copy_global_to_shared(
                        cache, [head, 0, 0], loaded.index(slot), quantized.index(slot * BLOCKS + i)
                    )
                count += 1
        i_round += 1
        live, i_head, at, last_block, num_tiles = _work(
            tiles, table_stride, i_round, KV_HEADS, N, BLOCK_TOKENS
        )


@gluon.jit
def _next_tile(
    tiles, table_stride, i_round, i_tile, live, i_head, at, last_block, num_tiles,
    KV_HEADS: gl.constexpr, N: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """The tile of positions before this one, or the last of the next round's work."""
    i_tile -= 1
    if i_tile < 0:
        i_round += 1
        live, i_head, at, last_block, num_tiles = _work(
            tiles, table_stride, i_round, KV_HEADS, N, BLOCK_TOKENS
        )
        i_tile = num_tiles - 1
    return i_round, i_tile, live, i_head, at, last_block, num_tiles


@gluon.jit
def _blocks(p_table, i_tile, last_block, o_n, BLOCK_TOKENS: gl.constexpr):
    """The cache's block of every position of a tile [N]."""
    N: gl.constexpr = o_n.shape[0]
    i_block = i_tile * (N // BLOCK_TOKENS) + o_n // BLOCK_TOKENS
    return gl.load(p_table + gl.minimum(i_block, last_block))


@gluon.jit
def _dequantize_tile(
    quantized, slot, loaded, released, round_, scales, wide, free, ready, stage, phase,
    N: gl.constexpr, QUANTIZED: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Dequantizes one tile of keys or values into the buffer that the attending warps read."""
    mbarrier.wait(loaded.index(slot), round_)
    mbarrier.wait(free.index(stage), phase)
    source = quantized.index(slot)
    target = wide.index(stage)
    b_next = source.slice(0, CHUNK, 0).load(ROW)
    b_next_scale = scales.slice(0, CHUNK, 0).load(gl.SliceLayout(1, ROW))
    for i in gl.static_range(N // CHUNK):
        b_quantized, b_scale = b_next, b_next_scale
        if i + 1 < N // CHUNK:  # loads overlap the conversion of the previous chunk
            b_next = source.slice((i + 1) * CHUNK, CHUNK, 0).load(ROW)
            b_next_scale = scales.slice((i + 1) * CHUNK, CHUNK, 0).load(gl.SliceLayout(1, ROW))
        b_dequantized = dequantized(b_quantized, QUANTIZED)
        if QUANTIZED == "fp8":
            b_scale = b_scale * PAIRS_UP
        b_high = b_scale.to(gl.bfloat16)
        b_low = (b_scale - b_high.to(gl.float32)).to(gl.bfloat16)
        b_dequantized = gl.inline_asm_elementwise(
            SCALED, "=r,r,r,r", [b_dequantized, b_high[:, None], b_low[:, None]], dtype=gl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
        target.slice(i * CHUNK, CHUNK, 0).store(b_dequantized)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready.index(stage), count=1)
    mbarrier.arrive(released.index(slot), count=1)


@gluon.jit
def _dequantize(
    scales, tiles, table, table_stride, quantized, loaded, released, own, keys, values, k_ready,
    k_free, v_ready, v_free, KV_HEADS: gl.constexpr, N: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    SLOTS: gl.constexpr, STAGES: gl.constexpr, QUANTIZED: gl.constexpr,
):  # fmt: skip
    """Dequantizes every tile's keys and values, in the order they are consumed; a tile's scales are
    copied one tile ahead, and its blocks looked up two ahead."""
    D: gl.constexpr = keys.shape[2]
    ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    o_n = gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    o_token = o_n % BLOCK_TOKENS
    i_round = 0
    live, i_head, at, last_block, num_tiles = _work(
        tiles, table_stride, i_round, KV_HEADS, N, BLOCK_TOKENS
    )
    i_tile = num_tiles - 1
    b_block = _blocks(table + at, i_tile, last_block, o_n, BLOCK_TOKENS)
    load_scales(scales, b_block, i_head, o_token, own, 0, live, D, KV_HEADS, BLOCK_TOKENS)
    here = live
    i_round, i_tile, live, i_head, at, last_block, num_tiles = _next_tile(
        tiles, table_stride, i_round, i_tile, live, i_head, at, last_block, num_tiles,
        KV_HEADS, N, BLOCK_TOKENS,
    )  # fmt: skip
    b_block = _blocks(table + at, i_tile, last_block, o_n, BLOCK_TOKENS)
    count = 0
    while here:
        async_copy.wait_group(0)
        thread_barrier()
        slot = count % 2
        load_scales(
            scales, b_block, i_head, o_token, own, 1 - slot, live, D, KV_HEADS, BLOCK_TOKENS
        )
        here = live
        stage, phase = count % STAGES, (count // STAGES & 1) ^ 1
        first = count * 2
        _dequantize_tile(
            quantized, first % SLOTS, loaded, released, first // SLOTS & 1, own.index(slot * 2),
            keys, k_free, k_ready, stage, phase, N, QUANTIZED, ROW,
        )  # fmt: skip
        i_round, i_tile, live, i_head, at, last_block, num_tiles = _next_tile(
            tiles, table_stride, i_round, i_tile, live, i_head, at, last_block, num_tiles,
        KV_HEADS, N, BLOCK_TOKENS,
        )  # fmt: skip
        b_block = _blocks(table + at, i_tile, last_block, o_n, BLOCK_TOKENS)
        _dequantize_tile(
            quantized, (first + 1) % SLOTS, loaded, released, (first + 1) // SLOTS & 1,
            own.index(slot * 2 + 1), values, v_free, v_ready, stage, phase, N, QUANTIZED, ROW,
        )  # fmt: skip
        count += 1


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_quantized_kernel(
    cache, scales, q, out, lse, tiles, table, q_token_stride, q_head_stride, out_token_stride,
    table_stride, factor,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, QUANTIZED: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """`cache`: descriptor of the cache as heads of a block, int8, one at a time; `scales`: the same
    memory as float32; `factor`: scale * log2(e)."""
    D: gl.constexpr = cache.block_shape[2]
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], gl.bfloat16)
    STORED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], gl.int8)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], WIDE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], WIDE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, PAIRS, D], WIDE)
    quantized = gl.allocate_shared_memory(
        gl.int8, [SLOTS * (N // BLOCK_TOKENS), 1, BLOCK_TOKENS, D], cache.layout
    )
    own = gl.allocate_shared_memory(gl.float32, [4, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ready, k_free, v_ready, v_free = barriers(STAGES)
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(released.index(i), count=1)
    fence_async_shared()
    flat = quantized._reinterpret(gl.int8, [SLOTS, N, D], STORED_LAYOUT)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    gl.constexpr(0), q, out, lse, None, tiles, queries, keys, values, k_ready,
                    k_free, v_ready, v_free, q_token_stride, q_head_stride, out_token_stride,
                    factor, factor, GROUP, KV_HEADS, N, STAGES, QUANTIZED == "fp8", 0, 0, False,
                    LSE,
                ),
            ),
            (
                attend,
                (
                    gl.constexpr(1), q, out, lse, None, tiles, queries, keys, values, k_ready,
                    k_free, v_ready, v_free, q_token_stride, q_head_stride, out_token_stride,
                    factor, factor, GROUP, KV_HEADS, N, STAGES, QUANTIZED == "fp8", 0, 0, False,
                    LSE,
                ),
            ),
            (
                _dequantize,
                (
                    scales, tiles, table, table_stride, flat, loaded, released, own, keys, values,
                    k_ready, k_free, v_ready, v_free, KV_HEADS, N, BLOCK_TOKENS, SLOTS, STAGES,
                    QUANTIZED,
                ),
            ),
            (
                _fetch,
                (
                    cache, tiles, table, table_stride, quantized, loaded, released,
                    KV_HEADS, N, BLOCK_TOKENS, SLOTS,
                ),
            ),
        ],
        [4, 4, 1],
        [216, 56, 24],
    )  # fmt: skip
