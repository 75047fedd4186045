"""A grouped GEMM on Hopper whose experts have few rows each: bound by reading each weight once, so
persistent programs keep STAGES steps of the TMA unit on their way, across the ends of tiles.

As in kernels/linear/triton_stream.py the tensor cores take the weight's rows as their rows: rows of
pairs may be few. An item is a tile of M sorted rows, all of one expert, and some of the weight's
outputs; programs take items in turn. Which expert a tile is of is read from the dispatch's list.

N sorted rows, I inputs, O results of an expert; ROWS weight rows of a matrix instruction, of which
an item has two parts: gates and ups, or twice as many results.
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

from headrace.back.kernels.triton.gluon import thread_barrier

ROWS = gl.constexpr(64)


@gluon.jit
def _ask(
    weight, x, tiles, unit, slot, weights, rows, ready, i_program, num_programs,
    COLUMNS: gl.constexpr, STEPS: gl.constexpr, EXPERT_ROWS: gl.constexpr, APART: gl.constexpr,
    RESULTS: gl.constexpr,
):  # fmt: skip
    """Asks for a unit's weights and rows."""
    K: gl.constexpr = weight.block_shape[1]
    M: gl.constexpr = x.block_shape[0]
    item = i_program + unit // STEPS * num_programs
    column = unit % STEPS * K
    i_tile = item // COLUMNS
    first = gl.load(tiles + 1 + 2 * i_tile) * EXPERT_ROWS + item % COLUMNS * RESULTS
    one = ready.index(slot)
    mbarrier.expect(one, (2 * ROWS + M) * K * 2)
    tma.async_copy_global_to_shared(weight, [first, column], one, weights.index(slot * 2))
    tma.async_copy_global_to_shared(
        weight, [first + APART, column], one, weights.index(slot * 2 + 1)
    )
    tma.async_copy_global_to_shared(x, [i_tile * M, column], one, rows.index(slot))


@gluon.jit
def grouped_stream_kernel(
    weight,
    x,
    tiles,
    y,
    RESULTS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`weight` [X O, I], `x` [N, I]: descriptors in blocks [ROWS, K] and [M, K]; y [N, RESULTS].
    If GATED (by SiLU) an expert has twice as many weight rows as results, gates first."""
    K: gl.constexpr = weight.block_shape[1]
    M: gl.constexpr = x.block_shape[0]
    PART: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = RESULTS if GATED else ROWS
    EXPERT_ROWS: gl.constexpr = 2 * RESULTS if GATED else RESULTS
    COLUMNS: gl.constexpr = (RESULTS + PART - 1) // PART
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2, ROWS, K], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    items = gl.load(tiles) * COLUMNS
    own = gl.maximum(items - i_program + num_programs - 1, 0) // num_programs
    end = own * STEPS
    for stage in gl.static_range(STAGES):
        if stage < end:
            _ask(
                weight, x, tiles, stage, stage, weights, rows, ready, i_program, num_programs,
                COLUMNS, STEPS, EXPERT_ROWS, APART, PART,
            )  # fmt: skip
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    for i_item in range(0, own):
        b_first = gl.zeros([ROWS, M], gl.float32, ACC)
        b_second = gl.zeros([ROWS, M], gl.float32, ACC)
        for unit in range(i_item * STEPS, i_item * STEPS + STEPS):
            slot = unit % STAGES
            mbarrier.wait(ready.index(slot), unit // STAGES & 1)
            b_x = rows.index(slot).permute((1, 0))
            b_first = warpgroup_mma(weights.index(slot * 2), b_x, b_first, is_async=True)
            b_second = warpgroup_mma(weights.index(slot * 2 + 1), b_x, b_second, is_async=True)
            b_first, b_second = warpgroup_mma_wait(0, deps=[b_first, b_second])
            thread_barrier()
            if unit + STAGES < end:
                _ask(
                    weight, x, tiles, unit + STAGES, slot, weights, rows, ready, i_program,
                    num_programs, COLUMNS, STEPS, EXPERT_ROWS, APART, PART,
                )  # fmt: skip
        b_y = gl.convert_layout(b_first, OUT)
        b_z = gl.convert_layout(b_second, OUT)
        item = i_program + i_item * num_programs
        o_row = item // COLUMNS * M + o_m
        o_out = item % COLUMNS * PART + o_n
        p_y = y + o_row[None, :].to(gl.int64) * RESULTS + o_out[:, None]
        m_first = (o_out < RESULTS)[:, None]
        if GATED:
            b_y = b_y / (1.0 + gl.exp(-b_y)) * b_z
            gl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_first)
        else:
            m_second = (o_out + ROWS < RESULTS)[:, None]
            gl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_first)
            gl.store(p_y + ROWS, b_z.to(y.dtype.element_ty), mask=m_second)
