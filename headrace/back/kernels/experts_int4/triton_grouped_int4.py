"""A grouped GEMM with weights of 4-bit numbers on Hopper: persistent programs, to which the TMA
unit streams the weights of the chosen experts, as in linear_int4/triton_stream_int4.py.

An item is a tile of M sorted rows, all of one expert, and one tile of its weight (a PAIR takes two,
or gates and ups). If SPLIT, all items' blocks, one after the other, are cut into as many equal runs
as there are programs, and the program that comes last adds up an item's sums in their order; else a
program takes whole items. How many items there are, only the device knows: the dispatch's list says
so. Weights become operands of the matrix instructions in registers (linear_int4/gluon_unpack.py).

The second of the two GEMMs (not GATED) asks for weights before the first has ended: the list it
reads was written before that one began, which lets it start only after its own wait.

N sorted rows, I inputs; tiles of 64 outputs, blocks of 128 inputs.
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

from headrace.back.kernels.experts.gluon_gated import gated
from headrace.back.kernels.linear_int4.gluon_sums import combined
from headrace.back.kernels.linear_int4.gluon_unpack import scale_layout, unpacked, word_layout
from headrace.back.kernels.triton.gluon import enter_late, thread_barrier

ROWS = gl.constexpr(64)
BLOCK = gl.constexpr(128)


@gluon.jit
def _tile_of(
    tiles, item, part: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, PAIR: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The tile of the weights that is a part of an item's. TILES: of a matrix."""
    expert = gl.load(tiles + 1 + item // COLUMNS * 2)
    if GATED:
        return expert * (2 * TILES) + part * TILES + item % COLUMNS
    else:
        return expert * TILES + item % COLUMNS * PAIR + part


@gluon.jit
def _run_of(i_program, programs, items, STEPS: gl.constexpr, SPLIT: gl.constexpr):
    """The units of a program: its first, and the one behind its last."""
    if SPLIT:
        units = items * STEPS
        return i_program * units // programs, (i_program + 1) * units // programs
    else:
        return (
            i_program * items // programs * STEPS,
            (i_program + 1) * items // programs * STEPS,
        )


@gluon.jit
def _ask_words(
    words, tiles, unit, stage, own, ready, EXPECTED: gl.constexpr, STEPS: gl.constexpr,
    TILES: gl.constexpr, COLUMNS: gl.constexpr, PAIR: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Asks for a unit's words; EXPECTED counts its rows, too."""
    mbarrier.expect(ready.index(stage), EXPECTED)
    for part in gl.static_range(PAIR):
        tile = _tile_of(tiles, unit // STEPS, part, TILES, COLUMNS, PAIR, GATED)
        tma.async_copy_global_to_shared(
            words, [(tile * STEPS + unit % STEPS) * 32, 0], ready.index(stage),
            own.index(stage * PAIR + part),
        )  # fmt: skip


@gluon.jit
def _ask_rows(x, unit, stage, rows, ready, STEPS: gl.constexpr, COLUMNS: gl.constexpr):
    """Asks for its rows."""
    M: gl.constexpr = x.block_shape[0]
    row = unit // STEPS // COLUMNS * M
    tma.async_copy_global_to_shared(
        x, [row, unit % STEPS * BLOCK], ready.index(stage), rows.index(stage)
    )


@gluon.jit
def _numbers(
    scales, tiles, unit, part: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr,
    COLUMNS: gl.constexpr, PAIR: gl.constexpr, GATED: gl.constexpr, WHOLE: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """The scales and minima [S, 32] of one part of a unit."""
    LAYOUT: gl.constexpr = scale_layout(S)
    place = _tile_of(tiles, unit // STEPS, part, TILES, COLUMNS, PAIR, GATED)
    if not WHOLE:
        place = place * STEPS + unit % STEPS
    o_s = gl.arange(0, S, layout=gl.SliceLayout(1, LAYOUT))
    o_r = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(scales + place.to(gl.int64) * (S * 32) + o_s[:, None] * 32 + o_r[None, :])


@gluon.jit
def grouped_stream_int4_kernel(
    words,
    scales,
    x,
    bias,
    tiles,
    y,
    partial,
    counters,
    clamp,
    alpha,
    RESULTS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    PAIR: gl.constexpr,
    GROUPS: gl.constexpr,
    WHOLE: gl.constexpr,
    MINIMA: gl.constexpr,
    FLOATS: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    CLAMP: gl.constexpr,
    OAI: gl.constexpr,
    SPLIT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`words`: a descriptor of int32 [tiles * blocks * 32, 32] in blocks [32, 32]; `x` one of the
    sorted rows [N, I] in blocks [M, 128]; y [N, RESULTS]. If GATED an expert has twice as many
    matrices, gates first. PAIR is 2 then."""
    dtype: gl.constexpr = scales.dtype.element_ty
    M: gl.constexpr = x.block_shape[0]
    S: gl.constexpr = GROUPS * (4 if MINIMA else 2)
    EXPECTED: gl.constexpr = PAIR * 4096 + M * BLOCK * 2
    TILE: gl.constexpr = M * ROWS
    COLUMNS: gl.constexpr = TILES if GATED else TILES // PAIR
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    own = gl.allocate_shared_memory(gl.int32, [STAGES * PAIR, 32, 32], words.layout)
    rows = gl.allocate_shared_memory(dtype, [STAGES, M, BLOCK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    if GATED:
        enter_late(DEPENDENT)
    i_program = gl.program_id(0)
    items = gl.load(tiles) * COLUMNS
    units = items * STEPS
    programs = gl.minimum(gl.num_programs(0), units if SPLIT else items)
    begin = 0
    end = 0
    if i_program < programs:
        begin, end = _run_of(i_program, programs, items, STEPS, SPLIT)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _ask_words(
                words, tiles, begin + stage, stage, own, ready, EXPECTED, STEPS, TILES, COLUMNS,
                PAIR, GATED,
            )  # fmt: skip
    b_next = _numbers(scales, tiles, begin, 0, STEPS, TILES, COLUMNS, PAIR, GATED, WHOLE, S)
    b_next_up = b_next
    if PAIR == 2:
        b_next_up = _numbers(scales, tiles, begin, 1, STEPS, TILES, COLUMNS, PAIR, GATED, WHOLE, S)
    if not GATED:
        enter_late(DEPENDENT)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _ask_rows(x, begin + stage, stage, rows, ready, STEPS, COLUMNS)
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    o_tile = o_n[:, None] + o_m[None, :] * ROWS
    m_tile = o_tile < TILE
    for item in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        first = gl.maximum(begin, item * STEPS)
        last = gl.minimum(end, (item + 1) * STEPS)
        b_acc = gl.zeros([ROWS, M], gl.float32, ACC)
        b_up = gl.zeros([ROWS, M], gl.float32, ACC)
        for unit in range(first, last):
            count = unit - begin
            slot = count % STAGES
            b_numbers = b_next
            b_numbers_up = b_next_up
            following = gl.minimum(unit + 1, end - 1)
            b_next = _numbers(
                scales, tiles, following, 0, STEPS, TILES, COLUMNS, PAIR, GATED, WHOLE, S
            )
            if PAIR == 2:
                b_next_up = _numbers(
                    scales, tiles, following, 1, STEPS, TILES, COLUMNS, PAIR, GATED, WHOLE, S
                )
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            b_x = rows.index(slot).permute((1, 0))
            b_words = own.index(slot * PAIR).load(word_layout())
            b_weight = unpacked(b_words, b_numbers, MINIMA, GROUPS, ACC, FLOATS)
            b_acc = warpgroup_mma(b_weight, b_x, b_acc, is_async=True)
            if PAIR == 2:
                b_words_up = own.index(slot * PAIR + 1).load(word_layout())
                b_weight_up = unpacked(b_words_up, b_numbers_up, MINIMA, GROUPS, ACC, FLOATS)
                b_up = warpgroup_mma(b_weight_up, b_x, b_up, is_async=True)
                b_acc, b_up, b_weight, b_weight_up = warpgroup_mma_wait(
                    0, deps=[b_acc, b_up, b_weight, b_weight_up]
                )
            else:
                b_acc, b_weight = warpgroup_mma_wait(0, deps=[b_acc, b_weight])
            thread_barrier()
            if unit + STAGES < end:
                _ask_words(
                    words, tiles, unit + STAGES, slot, own, ready, EXPECTED, STEPS, TILES, COLUMNS,
                    PAIR, GATED,
                )  # fmt: skip
                _ask_rows(x, unit + STAGES, slot, rows, ready, STEPS, COLUMNS)
        b_y = gl.convert_layout(b_acc, OUT)
        b_u = gl.convert_layout(b_up, OUT)
        done = item >= 0
        if SPLIT:
            done, b_y, b_u = combined(
                b_y, b_u, partial, counters, i_program, item, begin, o_tile, m_tile, STEPS, units,
                programs, PAIR, TILE,
            )  # fmt: skip
        if done:
            if FLOATS:
                b_y = b_y * 65536.0
                b_u = b_u * 65536.0
            i_list = item // COLUMNS
            i_expert = gl.load(tiles + 1 + 2 * i_list)
            m_m = o_m < gl.load(tiles + 2 + 2 * i_list)
            o_out = item % COLUMNS * (ROWS if GATED else PAIR * ROWS) + o_n
            m_n = o_out < RESULTS
            p_bias = bias
            if BIAS:
                p_bias = bias + i_expert * (2 * RESULTS if GATED else RESULTS) + o_out
                b_y += gl.load(p_bias, mask=m_n, other=0.0).to(gl.float32)[:, None]
            p_y = y + (i_list * M + o_m)[None, :].to(gl.int64) * RESULTS + o_out[:, None]
            m_y = m_n[:, None] & m_m[None, :]
            if GATED:
                if BIAS:
                    b_u += gl.load(p_bias + RESULTS, mask=m_n, other=0.0).to(gl.float32)[:, None]
                b_y = gated(b_y, b_u, clamp, alpha, CLAMP, OAI)
            elif PAIR == 2:
                m_more = o_out + ROWS < RESULTS
                if BIAS:
                    b_u += gl.load(p_bias + ROWS, mask=m_more, other=0.0).to(gl.float32)[:, None]
                m_u = m_more[:, None] & m_m[None, :]
                gl.store(p_y + ROWS, b_u.to(y.dtype.element_ty), mask=m_u)
            gl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)
