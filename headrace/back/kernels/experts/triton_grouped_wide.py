"""A grouped GEMM on Hopper whose experts have many rows each: bound by the tensor cores.

As in kernels/linear/triton_wide.py two groups of warps multiply, a half of a tile's rows each, by
the same part of the weight, and a third group of one warp asks the TMA unit for STAGES steps ahead,
over the ends of tiles. A tile is of one expert whole: the dispatch's list says of which, and that
is all that distinguishes this from a plain GEMM. Items are taken columns first: programs that run
at the same time share an expert's weight and its rows in the second-level cache.

N sorted rows, I inputs, O results of an expert. An item has M rows and 2 PART weight rows: gates
and ups of PART results, or 2 PART results, which leave in two parts.
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

from headrace.back.kernels.triton.gluon import enter, thread_barrier


@gluon.jit
def _fetch(
    x, weight, tiles, rows, weights, ready, free, COLUMNS: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr, EXPERT_ROWS: gl.constexpr, APART: gl.constexpr, RESULTS: gl.constexpr,
):  # fmt: skip
    """Asks for every step of every item, in the order they are taken."""
    R: gl.constexpr = x.block_shape[0]
    K: gl.constexpr = x.block_shape[1]
    PART: gl.constexpr = weight.block_shape[0]
    count = 0
    for item in range(gl.program_id(0), gl.load(tiles) * COLUMNS, gl.num_programs(0)):
        i_tile = item // COLUMNS
        is_full = gl.load(tiles + 2 + 2 * i_tile) > R
        first = gl.load(tiles + 1 + 2 * i_tile) * EXPERT_ROWS + item % COLUMNS * RESULTS
        for step in range(0, STEPS):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            one = ready.index(stage)
            mine = rows.index(stage)
            row = i_tile * (2 * R)
            if is_full:
                mbarrier.expect(one, (2 * R + 2 * PART) * K * 2)
                second = mine.slice(R, R, 0)
                tma.async_copy_global_to_shared(x, [row + R, step * K], one, second)
            else:
                mbarrier.expect(one, (R + 2 * PART) * K * 2)
            tma.async_copy_global_to_shared(x, [row, step * K], one, mine.slice(0, R, 0))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    weight, [first + half * APART, step * K], one,
                    weights.index(stage).slice(half * PART, PART, 0),
                )  # fmt: skip
            count += 1


@gluon.jit
def _leave(b_y, out, y, row, column):
    """Writes results by way of shared memory, once what was there before has left."""
    tma.store_wait(0)
    thread_barrier()
    out.store(b_y.to(y.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(y, [row, column], out)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, y, tiles, rows, weights, outs, ready, free, COLUMNS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, RESULTS: gl.constexpr,
):  # fmt: skip
    """Multiplies one half of every tile's rows, if any of them is a pair."""
    M: gl.constexpr = rows.shape[1]
    R: gl.constexpr = M // 2
    WIDTH: gl.constexpr = weights.shape[1]
    PART: gl.constexpr = WIDTH // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    out = outs.index(HALF)
    count = 0
    for item in range(gl.program_id(0), gl.load(tiles) * COLUMNS, gl.num_programs(0)):
        if gl.load(tiles + 2 + item // COLUMNS * 2) > HALF * R:
            b_acc = gl.zeros([R, WIDTH], gl.float32, ACC)
            for step in range(0, STEPS):
                stage = (count + step) % STAGES
                mbarrier.wait(ready.index(stage), (count + step) // STAGES & 1)
                b_acc = warpgroup_mma(
                    rows.index(stage).slice(HALF * R, R, 0),
                    weights.index(stage).permute((1, 0)), b_acc, use_acc=step > 0, is_async=True,
                )  # fmt: skip
                b_acc = warpgroup_mma_wait(1, deps=[b_acc])
                if step > 0:  # the GEMM of the step before is done
                    thread_barrier()
                    mbarrier.arrive(free.index((count + step - 1) % STAGES), count=1)
            b_acc = warpgroup_mma_wait(0, deps=[b_acc])
            thread_barrier()
            mbarrier.arrive(free.index((count + STEPS - 1) % STAGES), count=1)
            b_first, b_second = b_acc.reshape([R, 2, PART]).permute((0, 2, 1)).split()
            row, column = item // COLUMNS * M + HALF * R, item % COLUMNS * RESULTS
            if GATED:
                b_first = b_first / (1.0 + gl.exp2(b_first * -1.4426950408889634)) * b_second
            _leave(b_first, out, y, row, column)
            if not GATED:
                _leave(b_second, out, y, row, column + PART)
        else:  # no row of this half is a pair
            for step in range(0, STEPS):
                stage = (count + step) % STAGES
                mbarrier.wait(ready.index(stage), (count + step) // STAGES & 1)
                mbarrier.arrive(free.index(stage), count=1)
        count += STEPS
    tma.store_wait(0)


@gluon.jit
def grouped_wide_kernel(
    x,
    weight,
    y,
    tiles,
    RESULTS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Descriptors: `x` [N, I] in blocks [M / 2, K]; `weight` [X O, I] in blocks [PART, K]; `y` [N,
    RESULTS] in blocks [M / 2, PART]. If GATED (by SiLU) an expert has twice as many weight rows as
    results, gates first."""
    M: gl.constexpr = 2 * x.block_shape[0]
    K: gl.constexpr = x.block_shape[1]
    PART: gl.constexpr = weight.block_shape[0]
    STRIDE: gl.constexpr = PART if GATED else 2 * PART
    APART: gl.constexpr = RESULTS if GATED else PART
    EXPERT_ROWS: gl.constexpr = 2 * RESULTS if GATED else RESULTS
    COLUMNS: gl.constexpr = (RESULTS + STRIDE - 1) // STRIDE
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * PART, K], weight.layout)
    outs = gl.allocate_shared_memory(x.dtype, [2, M // 2, PART], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    enter(DEPENDENT)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    gl.constexpr(0), y, tiles, rows, weights, outs, ready, free, COLUMNS, STEPS, STAGES,
                    GATED, STRIDE,
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(1), y, tiles, rows, weights, outs, ready, free, COLUMNS, STEPS, STAGES,
                    GATED, STRIDE,
                ),
            ),
            (
                _fetch,
                (
                    x, weight, tiles, rows, weights, ready, free, COLUMNS, STEPS, STAGES, EXPERT_ROWS,
                    APART, STRIDE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
