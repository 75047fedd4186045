"""A GEMM with up to 64 tokens on Hopper: persistent programs, to which the TMA unit streams the
weight.

The work is all tiles' steps along the inputs, one after the other, cut into as many equal runs as
there are programs, so that all of them end together, whatever the shape. A program has STAGES steps
on their way at any time, the first of them from before the kernel it waits for has ended: its
shared memory is small enough that the programs of two such kernels fit a multiprocessor beside each
other. Where runs share a tile, each leaves its sums, and the program that comes last adds them up
in their order. The tensor cores take the weight's rows as its rows: tokens may be few.

T tokens (M padded), I inputs, O outputs; tiles of ROWS outputs, steps of K inputs.
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

ROWS = gl.constexpr(64)
"""Outputs of a tile: rows of one matrix instruction."""


@gluon.jit
def _ask_weight(
    weight, unit, stage, weights, ready, EXPECTED: gl.constexpr,
    STEPS: gl.constexpr, K: gl.constexpr, OUTPUTS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Asks for a unit's part of the weight; the tokens' part is to follow."""
    mbarrier.expect(ready.index(stage), EXPECTED)
    row, column = unit // STEPS * ROWS, unit % STEPS * K
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            weight, [row + part * OUTPUTS, column], ready.index(stage), weights.index(stage * PARTS + part)
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens"])
def stream_kernel(
    weight,
    x,
    bias,
    y,
    partial,
    counters,
    num_tokens,
    y_stride,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    UNITS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`weight`, `x`: descriptors of [O, I] and [T, I] in blocks [ROWS, K] and [M, K]. OUTPUTS are
    those of y: if GATED (by SiLU) the weight has twice as many rows, gates first. With ADD y is the
    residual. UNITS = tiles * STEPS. `partial` float32 [PROGRAMS, 2, 1 or 2, M, ROWS]."""
    K: gl.constexpr = weight.block_shape[1]
    M: gl.constexpr = x.block_shape[0]
    PARTS: gl.constexpr = 2 if GATED else 1
    EXPECTED: gl.constexpr = (PARTS * ROWS + M) * K * 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS, ROWS, K], weight.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    i_program = gl.program_id(0)
    begin = i_program * UNITS // PROGRAMS
    end = (i_program + 1) * UNITS // PROGRAMS
    thread_barrier()
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _ask_weight(
                weight, begin + stage, stage, weights, ready, EXPECTED, STEPS, K, OUTPUTS, PARTS
            )
    enter(DEPENDENT)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            tma.async_copy_global_to_shared(
                x, [0, (begin + stage) % STEPS * K], ready.index(stage), tokens.index(stage)
            )
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    o_tile = o_n[:, None] + o_m[None, :] * ROWS
    m_m = o_m < num_tokens
    for i_tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        first = gl.maximum(begin, i_tile * STEPS)
        last = gl.minimum(end, (i_tile + 1) * STEPS)
        b_acc = gl.zeros([ROWS, M], gl.float32, ACC)
        b_up = gl.zeros([ROWS, M], gl.float32, ACC)
        for unit in range(first, last):
            count = unit - begin
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            b_x = tokens.index(slot).permute((1, 0))
            b_acc = warpgroup_mma(weights.index(slot * PARTS), b_x, b_acc, is_async=True)
            if GATED:
                b_up = warpgroup_mma(weights.index(slot * PARTS + 1), b_x, b_up, is_async=True)
                b_acc, b_up = warpgroup_mma_wait(0, deps=[b_acc, b_up])
            else:
                b_acc = warpgroup_mma_wait(0, deps=[b_acc])
            thread_barrier()
            if unit + STAGES < end:
                _ask_weight(
                    weight, unit + STAGES, slot, weights, ready, EXPECTED, STEPS, K, OUTPUTS, PARTS
                )
                tma.async_copy_global_to_shared(
                    x, [0, (unit + STAGES) % STEPS * K], ready.index(slot), tokens.index(slot)
                )
        b_y = gl.convert_layout(b_acc, OUT)
        b_u = gl.convert_layout(b_up, OUT)
        owner = ((i_tile * STEPS + 1) * PROGRAMS - 1) // UNITS
        sharers = ((i_tile + 1) * STEPS * PROGRAMS - 1) // UNITS - owner + 1
        done = sharers == 1
        if sharers > 1:
            TILE: gl.constexpr = M * ROWS
            place = i_program * 2 + (first == i_tile * STEPS).to(gl.int32)
            p_mine = partial + place * (PARTS * TILE) + o_tile
            gl.store(p_mine, b_y, mask=m_m[None, :])
            if GATED:
                gl.store(p_mine + TILE, b_u, mask=m_m[None, :])
            thread_barrier()
            done = gl.atomic_add(counters + i_tile, 1, sem="acq_rel") == sharers - 1
            if done:
                gl.store(counters + i_tile, 0)
                b_y = gl.zeros([ROWS, M], gl.float32, OUT)
                b_u = gl.zeros([ROWS, M], gl.float32, OUT)
                for i in range(0, sharers):
                    place = (owner + i) * 2 + (i == 0).to(gl.int32)
                    p_one = partial + place * (PARTS * TILE) + o_tile
                    b_y += gl.load(p_one, mask=m_m[None, :], other=0.0, cache_modifier=".cg")
                    if GATED:
                        b_u += gl.load(
                            p_one + TILE, mask=m_m[None, :], other=0.0, cache_modifier=".cg"
                        )
        if done:
            o_out = i_tile * ROWS + o_n
            m_n = o_out < OUTPUTS
            if BIAS:
                b_y += gl.load(bias + o_out, mask=m_n, other=0.0).to(gl.float32)[:, None]
            if GATED:
                if BIAS:
                    b_u += gl.load(bias + OUTPUTS + o_out, mask=m_n, other=0.0).to(gl.float32)[
                        :, None
                    ]
                b_y = b_y / (1.0 + gl.exp(-b_y)) * b_u
            m_y = m_n[:, None] & m_m[None, :]
            p_y = y + o_m[None, :].to(gl.int64) * y_stride + o_out[:, None]
            if ADD:
                b_y += gl.load(p_y, mask=m_y, other=0.0).to(gl.float32)
            gl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)
