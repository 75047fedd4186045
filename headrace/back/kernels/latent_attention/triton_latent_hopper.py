"""Decode attention over latents on Hopper: persistent programs, to which the TMA unit streams the
cache, each latent once for keys and values of up to 64 heads.

The positions of all rows, in tiles, one row behind the other, are cut into runs as long as each
other, one a program (`latent_runs_kernel` says where each begins). Positions are the rows of the
matrix instructions and heads their columns, so that few heads waste nothing: scores [POSITIONS, Q],
then values, the same latents transposed, by the weights [POSITIONS, Q]. A run has STAGES tiles on
their way, whatever rows they belong to. Rows that runs share are left in parts, at most two a run,
and `latent_merge_kernel` adds them up in their order, by as many programs as there are heads.

C rank, R rotary dimensions, Q heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.back.kernels.attention.gluon_softmax import softmax_weights
from headrace.back.kernels.attention.triton_prefill_hopper import blocks_from
from headrace.back.kernels.attention.triton_softmax import split_weights
from headrace.back.kernels.triton.gluon import enter, thread_barrier
from headrace.back.kernels.triton.grid import enter as enter_triton

POSITIONS = gl.constexpr(64)
"""Of a tile: rows of one matrix instruction."""


@triton.jit(do_not_specialize=["num_rows"])
def latent_runs_kernel(
    lengths, untils, rows, num_rows, RUNS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: runs. untils [ROWS + 1]: tiles before each row, and all of them behind the last; rows
    [RUNS]: that of each run's first tile."""
    enter_triton(DEPENDENT)
    i_run = tl.program_id(0)
    o_r = tl.arange(0, ROWS)
    b_length = tl.load(lengths + o_r, mask=o_r < num_rows, other=0)
    b_until = tl.cumsum(tl.cdiv(b_length, N), axis=0)
    total = tl.max(b_until, axis=0)
    begin = (i_run.to(tl.int64) * total // RUNS).to(tl.int32)
    tl.store(rows + i_run, tl.sum((b_until <= begin).to(tl.int32), axis=0))
    if i_run == 0:
        tl.store(untils, 0)
        tl.store(untils + 1 + o_r, b_until)


@triton.jit
def latent_merge_kernel(
    partial, untils, rows, starts, out, HEADS: tl.constexpr, Q: tl.constexpr, RANK: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BY_RUN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: rows, heads, parts of D elements of the rank; BY_RUN: in place of rows the runs but the
    last, each of which has at most one row that begins in it and goes on. Rows that one run had
    whole are done already. C: the rank, padded."""
    enter_triton(DEPENDENT)
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    if BY_RUN:
        i_row = tl.load(rows + 1 + i_row)
        if i_row >= ROWS:  # nothing is left for the next run
            return
    total = tl.load(untils + ROWS).to(tl.int64)
    first, until = tl.load(untils + i_row), tl.load(untils + i_row + 1)
    if first >= until:
        return
    owner = (((first + 1).to(tl.int64) * RUNS - 1) // total).to(tl.int32)
    last = ((until.to(tl.int64) * RUNS - 1) // total).to(tl.int32)
    if (owner == last) | (BY_RUN & (owner != tl.program_id(0))):
        return
    o_d = tl.program_id(2) * D + tl.arange(0, D)
    SIZE: tl.constexpr = Q * (C + 2)
    p_head = partial + i_head // Q * (2 * RUNS * SIZE) + i_head % Q * (C + 2)
    largest = float("-inf")
    total_sum = 0.0
    b_acc = tl.zeros([D], tl.float32)
    for begin in range(owner, last + 1, CHUNK):
        o_i = begin + tl.arange(0, CHUNK)
        b_wide = o_i.to(tl.int64)
        m_i = (o_i <= last) & ((b_wide + 1) * total // RUNS > b_wide * total // RUNS)  # not empty
        p_i = p_head + (o_i * 2 + (o_i == owner).to(tl.int32)).to(tl.int64) * SIZE
        b_max = tl.load(p_i + C, mask=m_i, other=float("-inf"))
        b_sum = tl.load(p_i + C + 1, mask=m_i, other=0.0)
        b_part = tl.load(p_i[:, None] + o_d[None, :], mask=m_i[:, None], other=0.0)
        b_weight, shrink, largest = split_weights(largest, b_max, False)
        total_sum = total_sum * shrink + tl.sum(b_sum * b_weight, axis=0)
        b_acc = b_acc * shrink + tl.sum(b_part * b_weight[:, None], axis=0)
    token = tl.load(starts + i_row).to(tl.int64)
    p_out = out + (token * HEADS + i_head) * RANK + o_d
    tl.store(p_out, (b_acc / total_sum).to(out.dtype.element_ty), mask=o_d < RANK)


@gluon.jit
def _row_of(untils, i_row, tile):
    """The row of a tile, from `i_row` on."""
    while gl.load(untils + i_row + 1) <= tile:
        i_row += 1
    return i_row


@gluon.jit
def _ask(
    latent, rotated, untils, lengths, table, table_stride, block_rows, i_row, tile, slot, latents,
    rotaries, ready, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """Asks for a tile of a row."""
    BLOCKS: gl.constexpr = POSITIONS // BLOCK_TOKENS
    C: gl.constexpr = latent.block_shape[1]
    R: gl.constexpr = rotated.block_shape[1]
    first_block = (tile - gl.load(untils + i_row)) * BLOCKS
    last_block = (gl.load(lengths + i_row) - 1) // BLOCK_TOKENS
    p_table = table + i_row.to(gl.int64) * table_stride
    blocks = blocks_from(p_table, first_block, last_block, BLOCKS)
    one = ready.index(slot)
    mbarrier.expect(one, POSITIONS * (C + R) * 2)
    for i in gl.static_range(BLOCKS):
        own = latents.index(slot).slice(i * BLOCK_TOKENS, BLOCK_TOKENS, 0)
        tma.async_copy_global_to_shared(latent, [blocks[i] * block_rows, 0], one, own)
        rotary = rotaries.index(slot).slice(i * BLOCK_TOKENS, BLOCK_TOKENS, 0)
        tma.async_copy_global_to_shared(rotated, [blocks[i] * block_rows, 0], one, rotary)


@gluon.jit
def _clear(tile, seen, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeroes positions from `seen` on: what lies there was never written, and 0 * NaN is NaN."""
    o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(tile.shape[0] // CHUNK):
        if (i + 1) * CHUNK > seen:
            chunk = tile.slice(i * CHUNK, CHUNK, 0)
            b_v = chunk.load(LAYOUT)
            m_v = (i * CHUNK + o_m < seen)[:, None]
            chunk.store(gl.where(m_v, b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _attend_tile(
    b_acc, b_sums, b_max, queries, rotary_queries, latents, rotaries, weights, seen, factor,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds a tile, of which `seen` positions hold something: sums [C, Q], weights of each position
    [POSITIONS, Q], maxima [Q] in units of log 2."""
    Q: gl.constexpr = queries.shape[0]
    b_s = gl.zeros([POSITIONS, Q], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(latents, queries.permute((1, 0)), b_s, use_acc=False, is_async=True)
    b_s = warpgroup_mma(rotaries, rotary_queries.permute((1, 0)), b_s, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=[b_s]) * factor
    o_m = gl.arange(0, POSITIONS, layout=gl.SliceLayout(1, S_LAYOUT))
    b_s = gl.where((o_m < seen)[:, None], b_s, float("-inf"))
    b_p, b_shrink, b_higher = softmax_weights(b_s, b_max, 1.0, True, 0)
    weights.store(b_p.to(latents.dtype))
    fence_async_shared()
    thread_barrier()
    b_acc = warpgroup_mma(
        latents.permute((1, 0)), weights, b_acc * b_shrink[None, :], is_async=True
    )
    b_sums = b_sums * b_shrink[None, :] + b_p
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    return b_acc, b_sums, b_higher


@gluon.jit(do_not_specialize=["table_stride", "block_rows"])
def latent_decode_kernel(
    latent, rotated, q, out, partial, untils, rows, starts, lengths, table, table_stride,
    block_rows, factor, HEADS: gl.constexpr, Q: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Grid (shares of Q heads, runs): those of one run go side by side, so that one of them brings
    a latent into the second-level cache for all. `latent`, `rotated`: descriptors of the cache as
    rows [., C] and [., R], a block at a time; a block is `block_rows` of them behind the other.
    `partial` float32 [shares, runs, 2, Q, C + 2]: of a row that began before the run, and of one
    that begins in it; sums, maximum and sum of weights. `factor`: scale * log2(e)."""
    C: gl.constexpr = latent.block_shape[1]
    R: gl.constexpr = rotated.block_shape[1]
    WIDTH: gl.constexpr = C + R
    SIZE: gl.constexpr = Q * (C + 2)
    dtype: gl.constexpr = latent.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SHORT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (R // 8), R // 8], [4, 1], [1, 0])
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q, C], dtype)
    R_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q, R], dtype)
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q, POSITIONS], dtype)
    latents = gl.allocate_shared_memory(dtype, [STAGES, POSITIONS, C], latent.layout)
    rotaries = gl.allocate_shared_memory(dtype, [STAGES, POSITIONS, R], rotated.layout)
    queries = gl.allocate_shared_memory(dtype, [Q, C], Q_SHARED)
    rotary_queries = gl.allocate_shared_memory(dtype, [Q, R], R_SHARED)
    weights = gl.allocate_shared_memory(dtype, [Q, POSITIONS], W_SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    enter(DEPENDENT)
    i_run = gl.program_id(1)
    i_head = gl.program_id(0) * Q
    total = gl.load(untils + ROWS).to(gl.int64)
    begin = (i_run * total // gl.num_programs(1)).to(gl.int32)
    end = ((i_run + 1) * total // gl.num_programs(1)).to(gl.int32)
    i_row = gl.load(rows + i_run)
    asked_row = i_row
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            asked_row = _row_of(untils, asked_row, begin + stage)
            _ask(
                latent, rotated, untils, lengths, table, table_stride, block_rows, asked_row,
                begin + stage, stage, latents, rotaries, ready, BLOCK_TOKENS,
            )  # fmt: skip
    o_q = gl.arange(0, Q, layout=gl.SliceLayout(0, S_LAYOUT))
    o_c = gl.arange(0, C, layout=gl.SliceLayout(1, S_LAYOUT))
    o_qc = gl.arange(0, Q, layout=gl.SliceLayout(1, ROW))
    o_cc = gl.arange(0, C, layout=gl.SliceLayout(0, ROW))
    o_qr = gl.arange(0, Q, layout=gl.SliceLayout(1, SHORT))
    o_r = gl.arange(0, R, layout=gl.SliceLayout(0, SHORT))
    m_q = i_head + o_q < HEADS
    weighed = weights.permute((1, 0))
    tile = begin
    while tile < end:
        i_row = _row_of(untils, i_row, tile)
        first = gl.load(untils + i_row)
        until = gl.load(untils + i_row + 1)
        last = gl.minimum(until, end)
        length = gl.load(lengths + i_row)
        token = gl.load(starts + i_row).to(gl.int64)
        p_q = q + (token * HEADS + i_head) * WIDTH
        p_own = p_q + o_qc[:, None] * WIDTH + o_cc[None, :]
        queries.store(gl.load(p_own, mask=(i_head + o_qc < HEADS)[:, None], other=0.0))
        p_rotary = p_q + o_qr[:, None] * WIDTH + (C + o_r)[None, :]
        rotary_queries.store(gl.load(p_rotary, mask=(i_head + o_qr < HEADS)[:, None], other=0.0))
        fence_async_shared()
        thread_barrier()
        b_max = gl.full([Q], float("-inf"), gl.float32, gl.SliceLayout(0, S_LAYOUT))
        b_sums = gl.zeros([POSITIONS, Q], gl.float32, S_LAYOUT)
        b_acc = gl.zeros([C, Q], gl.float32, S_LAYOUT)
        for i_tile in range(tile, last):
            count = i_tile - begin
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            seen = length - (i_tile - first) * POSITIONS
            if seen < POSITIONS:
                _clear(latents.index(slot), seen, 16, ROW)
            b_acc, b_sums, b_max = _attend_tile(
                b_acc, b_sums, b_max, queries, rotary_queries, latents.index(slot),
                rotaries.index(slot), weighed, seen, factor, S_LAYOUT,
            )  # fmt: skip
            thread_barrier()
            if i_tile + STAGES < end:
                asked_row = _row_of(untils, asked_row, i_tile + STAGES)
                _ask(
                    latent, rotated, untils, lengths, table, table_stride, block_rows, asked_row,
                    i_tile + STAGES, slot, latents, rotaries, ready, BLOCK_TOKENS,
                )  # fmt: skip
        b_sum = gl.sum(b_sums, axis=0)
        if (first >= begin) & (until <= end):
            p_out = out + (token * HEADS + i_head + o_q)[None, :] * C + o_c[:, None]
            b_out = b_acc / b_sum[None, :]
            gl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_q[None, :])
        else:
            place = (gl.program_id(0) * gl.num_programs(1) + i_run) * 2 + (first >= begin).to(
                gl.int32
            )
            p_mine = partial + place.to(gl.int64) * SIZE + o_q * (C + 2)
            gl.store(gl.expand_dims(p_mine, 0) + o_c[:, None], b_acc)
            gl.store(p_mine + C, b_max)
            gl.store(p_mine + C + 1, b_sum)
        tile = last
