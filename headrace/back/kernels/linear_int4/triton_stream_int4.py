"""GEMMs with weights of 4-bit integers on Hopper: persistent programs, to which the TMA unit
streams the weight, as in linear/triton_stream.py.

The work is all tiles' blocks, one after the other, cut into as many equal runs as there are
programs. A program has STAGES blocks on their way at any time, the first of them from before the
kernel it waits for has ended: the weight and its scales are there before any token is. Weights
become operands of the matrix instructions in registers (gluon_unpack.py). Where runs share a tile,
each leaves its sums, and the program that comes last adds them up in their order.

One token lies in shared memory whole, times the weight of the norm before if there is one (its
scale is one number, so it is applied to the sums), and is every column of the matrix instruction.
More are brought block by block beside the weight.

T tokens (M padded), I inputs, O outputs; tiles of 64 outputs (a PAIR takes two, or gates and ups),
blocks of 128 inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.back.kernels.linear_int4.gluon_sums import combined, silu_times
from headrace.back.kernels.linear_int4.gluon_unpack import scale_layout, unpacked, word_layout
from headrace.back.kernels.triton.gluon import enter, thread_barrier

ROWS = gl.constexpr(64)
BLOCK = gl.constexpr(128)
CHUNK = gl.constexpr(1024)
"""Inputs of one token that are loaded together, of which FOUR are on their way at once."""
FOUR = gl.constexpr(4)


@gluon.jit
def _tile_of(i_tile, part: gl.constexpr, PAIR: gl.constexpr, UP: gl.constexpr):
    """The tile of the weight that is a part of a program's tile. UP: tiles from gates to ups, 0:
    nothing is gated."""
    if UP > 0:
        return i_tile + part * UP
    return i_tile * PAIR + part


@gluon.jit
def _ask_words(
    words, unit, stage, own, ready, EXPECTED: gl.constexpr, STEPS: gl.constexpr, PAIR: gl.constexpr,
    UP: gl.constexpr,
):  # fmt: skip
    """Asks for a unit's words; if it has tokens to follow, EXPECTED counts them."""
    mbarrier.expect(ready.index(stage), EXPECTED)
    for part in gl.static_range(PAIR):
        row = (_tile_of(unit // STEPS, part, PAIR, UP) * STEPS + unit % STEPS) * 32
        tma.async_copy_global_to_shared(
            words, [row, 0], ready.index(stage), own.index(stage * PAIR + part)
        )


@gluon.jit
def _numbers(
    scales, unit, part: gl.constexpr, STEPS: gl.constexpr, PAIR: gl.constexpr, UP: gl.constexpr,
    WHOLE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The scales and minima [S, 32] of one part of a unit."""
    LAYOUT: gl.constexpr = scale_layout(S)
    place = _tile_of(unit // STEPS, part, PAIR, UP)
    if not WHOLE:
        place = place * STEPS + unit % STEPS
    o_s = gl.arange(0, S, layout=gl.SliceLayout(1, LAYOUT))
    o_r = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(scales + place.to(gl.int64) * (S * 32) + o_s[:, None] * 32 + o_r[None, :])


@gluon.jit
def one_kernel(
    words,
    scales,
    x,
    norm_weight,
    bias,
    y,
    partial,
    counters,
    eps,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    UNITS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    PAIR: gl.constexpr,
    GROUPS: gl.constexpr,
    WHOLE: gl.constexpr,
    MINIMA: gl.constexpr,
    FLOATS: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One token. `words`: a descriptor of int32 [tiles * blocks * 32, 32] in blocks [32, 32].
    OUTPUTS are those of y: if GATED (by SiLU) the weight has twice as many, gates first. With ADD y
    is the residual. UNITS = tiles or pairs * STEPS."""
    dtype: gl.constexpr = scales.dtype.element_ty
    S: gl.constexpr = GROUPS * (4 if MINIMA else 2)
    UP: gl.constexpr = OUTPUTS // ROWS if GATED else 0
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    PARTS: gl.constexpr = (INPUTS + CHUNK * FOUR - 1) // (CHUNK * FOUR)
    own = gl.allocate_shared_memory(gl.int32, [STAGES * PAIR, 32, 32], words.layout)
    token = gl.allocate_shared_memory(
        dtype, [PARTS, FOUR, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    blocks = token._reinterpret(
        dtype, [PARTS * FOUR * CHUNK // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
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
            _ask_words(words, begin + stage, stage, own, ready, PAIR * 4096, STEPS, PAIR, UP)
    b_next = _numbers(scales, begin, 0, STEPS, PAIR, UP, WHOLE, S)
    b_next_up = b_next
    if PAIR == 2:
        b_next_up = _numbers(scales, begin, 1, STEPS, PAIR, UP, WHOLE, S)
    enter(DEPENDENT)
    o_row = gl.arange(0, FOUR, layout=gl.SliceLayout(1, ROW))[:, None] * CHUNK
    o_i = o_row + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROW))[None, :]
    squares = 0.0
    for part in gl.static_range(PARTS):
        o_part = o_i + part * (FOUR * CHUNK)
        m_part = o_part < INPUTS
        b_part = gl.load(x + o_part, mask=m_part, other=0.0)
        if NORM:
            b_norm = gl.load(norm_weight + o_part, mask=m_part, other=0.0)
            b_wide = b_part.to(gl.float32)
            squares += gl.sum(gl.sum(b_wide * b_wide, axis=1), axis=0)
            b_part = (b_wide * b_norm).to(dtype)
        token.index(part).store(b_part)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(squares / INPUTS + eps)
    thread_barrier()
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    m_all = o_n < ROWS
    for i_tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        first = gl.maximum(begin, i_tile * STEPS)
        last = gl.minimum(end, (i_tile + 1) * STEPS)
        b_acc = gl.zeros([ROWS, 8], gl.float32, ACC)
        b_up = gl.zeros([ROWS, 8], gl.float32, ACC)
        for unit in range(first, last):
            count = unit - begin
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            b_words = own.index(slot * PAIR).load(word_layout())
            b_words_up = b_words
            if PAIR == 2:
                b_words_up = own.index(slot * PAIR + 1).load(word_layout())
            thread_barrier()
            if unit + STAGES < end:
                _ask_words(words, unit + STAGES, slot, own, ready, PAIR * 4096, STEPS, PAIR, UP)
            b_numbers = b_next
            b_numbers_up = b_next_up
            following = gl.minimum(unit + 1, end - 1)
            b_next = _numbers(scales, following, 0, STEPS, PAIR, UP, WHOLE, S)
            if PAIR == 2:
                b_next_up = _numbers(scales, following, 1, STEPS, PAIR, UP, WHOLE, S)
            b_column = blocks.index(unit % STEPS).load(gl.SliceLayout(1, SECOND)).expand_dims(1)
            b_x, _ = gl.broadcast(b_column, gl.zeros([BLOCK, 8], dtype, SECOND))
            b_acc = mma_v2(unpacked(b_words, b_numbers, MINIMA, GROUPS, ACC, FLOATS), b_x, b_acc)
            if PAIR == 2:
                b_up = mma_v2(
                    unpacked(b_words_up, b_numbers_up, MINIMA, GROUPS, ACC, FLOATS), b_x, b_up
                )
        # all columns are the same
        b_y = gl.sum(b_acc, axis=1) * 0.125
        b_u = gl.sum(b_up, axis=1) * 0.125
        done, b_y, b_u = combined(
            b_y, b_u, partial, counters, i_program, i_tile, begin, o_n, m_all,
            STEPS, UNITS, PROGRAMS, PAIR, ROWS,
        )  # fmt: skip
        if done:
            if FLOATS:
                b_y *= 65536.0
                b_u *= 65536.0
            if NORM:
                b_y *= factor
                b_u *= factor
            o_out = _tile_of(i_tile, 0, PAIR, UP) * ROWS + o_n
            m_n = o_out < OUTPUTS
            if BIAS:
                b_y += gl.load(bias + o_out, mask=m_n, other=0.0).to(gl.float32)
            if PAIR == 2:
                o_up = _tile_of(i_tile, 1, PAIR, UP) * ROWS + o_n
                if BIAS:
                    m_up = o_up < OUTPUTS * (2 if GATED else 1)
                    b_u += gl.load(bias + o_up, mask=m_up, other=0.0).to(gl.float32)
                if GATED:
                    b_y = silu_times(b_y, b_u)
                else:
                    m_up = o_up < OUTPUTS
                    if ADD:
                        b_u += gl.load(y + o_up, mask=m_up, other=0.0).to(gl.float32)
                    gl.store(y + o_up, b_u.to(y.dtype.element_ty), mask=m_up)
            if ADD:
                b_y += gl.load(y + o_out, mask=m_n, other=0.0).to(gl.float32)
            gl.store(y + o_out, b_y.to(y.dtype.element_ty), mask=m_n)


@gluon.jit
def _ask_tokens(x, unit, stage, tokens, ready, row, STEPS: gl.constexpr):
    tma.async_copy_global_to_shared(
        x, [row, unit % STEPS * BLOCK], ready.index(stage), tokens.index(stage)
    )


@gluon.jit
def _places(y, o_out, o_m, m_m, y_stride, OUTPUTS: gl.constexpr):
    """Where a tile's results lie, and which there are."""
    p_y = y + o_m[None, :].to(gl.int64) * y_stride + o_out[:, None]
    return p_y, (o_out < OUTPUTS)[:, None] & m_m[None, :]


@gluon.jit
def _write(
    b_y, b_old, bias, y, o_out, o_m, m_m, y_stride, OUTPUTS: gl.constexpr, BIAS: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    p_y, m_y = _places(y, o_out, o_m, m_m, y_stride, OUTPUTS)
    if BIAS:
        b_y += gl.load(bias + o_out, mask=o_out < OUTPUTS, other=0.0).to(gl.float32)[:, None]
    if ADD:
        b_y += b_old.to(gl.float32)
    gl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


@gluon.jit(do_not_specialize=["num_tokens"])
def few_kernel(
    words,
    scales,
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
    PAIR: gl.constexpr,
    GROUPS: gl.constexpr,
    WHOLE: gl.constexpr,
    MINIMA: gl.constexpr,
    FLOATS: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Several tokens: `x`, a descriptor of [T, I] in blocks [M, 128]; M of them by the programs of
    one place in the grid's second dimension. The rest as in `one_kernel`; `partial` and `counters`
    of each such place lie behind those of the one before."""
    dtype: gl.constexpr = scales.dtype.element_ty
    M: gl.constexpr = x.block_shape[0]
    S: gl.constexpr = GROUPS * (4 if MINIMA else 2)
    UP: gl.constexpr = OUTPUTS // ROWS if GATED else 0
    EXPECTED: gl.constexpr = PAIR * 4096 + M * BLOCK * 2
    TILE: gl.constexpr = M * ROWS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    own = gl.allocate_shared_memory(gl.int32, [STAGES * PAIR, 32, 32], words.layout)
    tokens = gl.allocate_shared_memory(dtype, [STAGES, M, BLOCK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    i_program = gl.program_id(0)
    row = gl.program_id(1) * M
    begin = i_program * UNITS // PROGRAMS
    end = (i_program + 1) * UNITS // PROGRAMS
    thread_barrier()
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _ask_words(words, begin + stage, stage, own, ready, EXPECTED, STEPS, PAIR, UP)
    b_next = _numbers(scales, begin, 0, STEPS, PAIR, UP, WHOLE, S)
    b_next_up = b_next
    if PAIR == 2:
        b_next_up = _numbers(scales, begin, 1, STEPS, PAIR, UP, WHOLE, S)
    enter(DEPENDENT)
    for stage in gl.static_range(STAGES):
        if begin + stage < end:
            _ask_tokens(x, begin + stage, stage, tokens, ready, row, STEPS)
    partial += gl.program_id(1) * (PROGRAMS * 2 * PAIR * TILE)
    counters += gl.program_id(1) * (UNITS // STEPS)
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
    o_tile = o_n[:, None] + o_m[None, :] * ROWS
    m_m = row + o_m < num_tokens
    m_tile = (o_n < ROWS)[:, None] & m_m[None, :]
    for i_tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        first = gl.maximum(begin, i_tile * STEPS)
        last = gl.minimum(end, (i_tile + 1) * STEPS)
        b_acc = gl.zeros([ROWS, M], gl.float32, ACC)
        b_up = gl.zeros([ROWS, M], gl.float32, ACC)
        for unit in range(first, last):
            count = unit - begin
            slot = count % STAGES
            b_numbers = b_next
            b_numbers_up = b_next_up
            following = gl.minimum(unit + 1, end - 1)
            b_next = _numbers(scales, following, 0, STEPS, PAIR, UP, WHOLE, S)
            if PAIR == 2:
                b_next_up = _numbers(scales, following, 1, STEPS, PAIR, UP, WHOLE, S)
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            b_x = tokens.index(slot).permute((1, 0))
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
                _ask_words(words, unit + STAGES, slot, own, ready, EXPECTED, STEPS, PAIR, UP)
                _ask_tokens(x, unit + STAGES, slot, tokens, ready, row, STEPS)
        o_out = _tile_of(i_tile, 0, PAIR, UP) * ROWS + o_n
        o_up = o_out + ROWS
        b_old = gl.zeros([ROWS, M], y.dtype.element_ty, OUT)
        b_old_up = b_old
        if ADD:  # read before others are waited for
            p_y, m_y = _places(y, o_out, row + o_m, m_m, y_stride, OUTPUTS)
            b_old = gl.load(p_y, mask=m_y, other=0.0)
            if PAIR == 2 and not GATED:
                p_y, m_y = _places(y, o_up, row + o_m, m_m, y_stride, OUTPUTS)
                b_old_up = gl.load(p_y, mask=m_y, other=0.0)
        done, b_y, b_u = combined(
            gl.convert_layout(b_acc, OUT), gl.convert_layout(b_up, OUT), partial, counters, i_program,
            i_tile, begin, o_tile, m_tile, STEPS, UNITS, PROGRAMS, PAIR, TILE,
        )  # fmt: skip
        if done:
            if FLOATS:
                b_y = b_y * 65536.0
                b_u = b_u * 65536.0
            if GATED:
                if BIAS:
                    b_y += gl.load(bias + o_out).to(gl.float32)[:, None]
                    b_u += gl.load(bias + OUTPUTS + o_out).to(gl.float32)[:, None]
                b_y = silu_times(b_y, b_u)
                _write(b_y, b_old, bias, y, o_out, row + o_m, m_m, y_stride, OUTPUTS, False, ADD)
            else:
                _write(b_y, b_old, bias, y, o_out, row + o_m, m_m, y_stride, OUTPUTS, BIAS, ADD)
                if PAIR == 2:
                    _write(
                        b_u, b_old_up, bias, y, o_up, row + o_m, m_m, y_stride, OUTPUTS, BIAS, ADD
                    )
