"""A gated GEMM of many tokens on Hopper: y = silu(x G^T) * (x U^T), of which only y is written.

A board that draws what it may is bound by energy: what counts are bytes moved, not only how long
the tensor cores wait. A tile is as large as the registers allow: two groups of warps hold M / 2
tokens each and share the gates and ups that the TMA unit brings, as does a third group of one warp,
STAGES steps of K inputs ahead, over the end of a tile. Programs are persistent; tiles that share
tokens or weights are taken at about the same time, so that they find them in the second-level
cache.

96 results a tile, which is no power of two: WIDE and NARROW of them are tensors of their own. With
tiles of 256 tokens 8B's 12,288 results are 128 tiles, a multiprocessor each.

T tokens, I inputs, O results; the weight holds O gates, then O ups.
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

WIDE = gl.constexpr(64)
NARROW = gl.constexpr(32)
"""Results of a tile, in two parts."""
BOX = gl.constexpr(32)
"""Rows of the weight that the TMA unit brings at once."""


@gluon.jit
def _place(i_tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Tile of tokens and tile of results: GROUP tiles of tokens take turns with each tile of
    results."""
    around = GROUP * tiles_n
    first = i_tile // around * GROUP
    size = gl.minimum(tiles_m - first, GROUP)
    inside = i_tile % around
    return first + inside % size, inside // size


@gluon.jit
def _ask_weight(weight, row, column, ready, wide, narrow):
    """Asks for the gates, or the ups, of a tile's results."""
    for i in gl.static_range(WIDE // BOX):
        tma.async_copy_global_to_shared(
            weight, [row + i * BOX, column], ready, wide.slice(i * BOX, BOX, 0)
        )
    for i in gl.static_range(NARROW // BOX):
        tma.async_copy_global_to_shared(
            weight, [row + WIDE + i * BOX, column], ready, narrow.slice(i * BOX, BOX, 0)
        )


@gluon.jit
def _fetch(
    x, weight, tokens, wide, narrow, ready, free, tiles_m, results, steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Asks for every step of every tile, in the order they are taken."""
    M: gl.constexpr = x.block_shape[0]
    K: gl.constexpr = x.block_shape[1]
    N: gl.constexpr = WIDE + NARROW
    tiles_n = gl.cdiv(results, N)
    count = 0
    for i_tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        i_m, i_n = _place(i_tile, tiles_m, tiles_n, GROUP)
        for step in range(0, steps):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            one = ready.index(stage)
            mbarrier.expect(one, (M + 2 * N) * K * 2)
            tma.async_copy_global_to_shared(x, [i_m * M, step * K], one, tokens.index(stage))
            for half in gl.static_range(2):
                _ask_weight(
                    weight, half * results + i_n * N, step * K, one,
                    wide.index(stage).slice(half * WIDE, WIDE, 0),
                    narrow.index(stage).slice(half * NARROW, NARROW, 0),
                )  # fmt: skip
            count += 1


@gluon.jit
def _gated(b_acc, dtype: gl.constexpr):
    """silu(gates) * ups of sums whose first half of columns are gates, in float32 up to the end."""
    halves: gl.constexpr = [b_acc.shape[0], 2, b_acc.shape[1] // 2]
    b_gate, b_up = b_acc.reshape(halves).permute((0, 2, 1)).split()
    return (b_gate / (1.0 + gl.exp2(b_gate * -1.4426950408889634)) * b_up).to(dtype)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, y_wide, y_narrow, tokens, wide, narrow, outs_wide, outs_narrow, ready, free,
    tiles_m, results, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiplies one half of every tile's tokens."""
    M: gl.constexpr = tokens.shape[1]
    R: gl.constexpr = M // 2
    N: gl.constexpr = WIDE + NARROW
    WIDE_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDE, 16])
    NARROW_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * NARROW, 16])
    out_wide, out_narrow = outs_wide.index(HALF), outs_narrow.index(HALF)
    tiles_n = gl.cdiv(results, N)
    count = 0
    for i_tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        i_m, i_n = _place(i_tile, tiles_m, tiles_n, GROUP)
        b_wide = gl.zeros([R, 2 * WIDE], gl.float32, WIDE_ACC)
        b_narrow = gl.zeros([R, 2 * NARROW], gl.float32, NARROW_ACC)
        for step in range(0, steps):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            mine = tokens.index(stage).slice(HALF * R, R, 0)
            b_wide = warpgroup_mma(
                mine, wide.index(stage).permute((1, 0)), b_wide, use_acc=step > 0, is_async=True
            )
            b_narrow = warpgroup_mma(
                mine, narrow.index(stage).permute((1, 0)), b_narrow, use_acc=step > 0, is_async=True
            )
            b_wide, b_narrow = warpgroup_mma_wait(2, deps=[b_wide, b_narrow])
            if step > 0:  # the GEMMs of the step before are done
                thread_barrier()
                mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
            count += 1
        b_wide, b_narrow = warpgroup_mma_wait(0, deps=[b_wide, b_narrow])
        thread_barrier()
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        tma.store_wait(0)  # of the tile before
        thread_barrier()
        out_wide.store(_gated(b_wide, y_wide.dtype))
        out_narrow.store(_gated(b_narrow, y_narrow.dtype))
        fence_async_shared()
        thread_barrier()
        row, column = i_m * M + HALF * R, i_n * N
        tma.async_copy_shared_to_global(y_wide, [row, column], out_wide)
        tma.async_copy_shared_to_global(y_narrow, [row, column + WIDE], out_narrow)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens"])
def wide_kernel(
    x,
    weight,
    y_wide,
    y_narrow,
    num_tokens,
    results,
    steps,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Descriptors: `x` [T, I] in blocks [M, K]; `weight` [2 O, I] in blocks [BOX, K]; `y_wide` and
    `y_narrow` of the same [T, O], in blocks [M / 2, WIDE or NARROW]. `steps`: of K inputs; what
    lies behind an edge reads as zero, and is not written."""
    M: gl.constexpr = x.block_shape[0]
    K: gl.constexpr = x.block_shape[1]
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    wide = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * WIDE, K], weight.layout)
    narrow = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * NARROW, K], weight.layout)
    outs_wide = gl.allocate_shared_memory(x.dtype, [2, M // 2, WIDE], y_wide.layout)
    outs_narrow = gl.allocate_shared_memory(x.dtype, [2, M // 2, NARROW], y_narrow.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    enter(DEPENDENT)
    tiles_m = gl.cdiv(num_tokens, M)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    gl.constexpr(0), y_wide, y_narrow, tokens, wide, narrow, outs_wide, outs_narrow, ready, free,
                    tiles_m, results, steps, STAGES, GROUP,
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(1), y_wide, y_narrow, tokens, wide, narrow, outs_wide, outs_narrow, ready, free,
                    tiles_m, results, steps, STAGES, GROUP,
                ),
            ),
            (
                _fetch,
                (x, weight, tokens, wide, narrow, ready, free, tiles_m, results, steps, STAGES, GROUP),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
