"""One token times a weight of 4-bit integers on Hopper, without a word between programs: a program
takes sixteen outputs at a time (a PAIR thirty-two, or gates and ups) with all their inputs.

Eight warps share the inputs: in a round of 1024 each has its own block of 128, and the token's
blocks are the columns of the matrix instruction, of which every warp keeps its own. Words go from
memory to registers, DEPTH rounds ahead, the first of them from before the kernel it waits for has
ended.

Integers become bfloat16 numbers above 128 with two instructions for two of them. What that adds is
taken off the sums, which begin with minus as much times the sum of a block's inputs; scales (and
minima) of 128 inputs or of all are applied to a block's sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from headrace.back.kernels.triton.gluon import enter, thread_barrier

TILE = gl.constexpr(16)
BLOCK = gl.constexpr(128)
WARPS = gl.constexpr(8)
ROUND = gl.constexpr(1024)
"""Inputs of all warps together."""
ABOVE = gl.constexpr(128.0)
"""What a bfloat16 number of an integer in its mantissa has more."""


@gluon.constexpr_function
def assembly():
    """Of two words ($8, $9) the eight pairs."""
    lines = ["{ .reg .b32 w;"]
    for word in range(2):
        for pair in range(4):  # e1 + 2 e2
            source = f"${8 + word}"
            if pair:
                lines.append(f"shr.b32 w, ${8 + word}, {4 * pair};")
                source = "w"
            lines.append(f"lop3.b32 ${word * 4 + pair}, {source}, 0x000f000f, 0x43004300, 0xea;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def constraints():
    """Of the same."""
    return ",".join(["=&r"] * 8 + ["r"] * 2)


@gluon.constexpr_function
def word_layout():
    """A round's words [64, 32] of sixteen outputs: four of a thread beside each other."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.jit
def _operand(b_words, ACC: gl.constexpr):
    """The integers of a round, 128 above what is stored, as the matrix instruction takes them:
    [8 * 16, 128], of which each warp holds its own block."""
    p = gl.inline_asm_elementwise(
        assembly(), constraints(), [b_words],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True, pack=2,
    )  # fmt: skip
    b_low = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
    b_high = gl.join(gl.join(p[4], p[5]), gl.join(p[6], p[7]))
    # warp, half block, output, lane, upper sixteen inputs, e0, e1, e2, lower sixteen
    b_bits = gl.join(b_low, b_high).reshape([8, 2, 8, 4, 2, 2, 2, 2, 2])
    b_bits = b_bits.permute((0, 6, 2, 1, 4, 8, 7, 3, 5)).reshape([128, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    return gl.convert_layout(b_bits.to(gl.bfloat16, bitcast=True), OPERAND, assert_trivial=True)


@gluon.jit
def _words(words, i_tile, i_round, STEPS: gl.constexpr, TILES: gl.constexpr):
    """A round's words of a tile of sixteen, 0 beyond the weight."""
    LAYOUT: gl.constexpr = word_layout()
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    o_col = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    block = i_round * 8 + o_row // 8
    o_word = block * 1024 + o_row // 4 % 2 * 512 + o_row % 4 * 32
    p_words = words + (i_tile // 4 * (STEPS * 1024) + i_tile % 4 * 128)
    m_row = (block < STEPS) & (i_tile < TILES)
    return gl.load(p_words + (o_word[:, None] + o_col[None, :]), mask=m_row[:, None], other=0)


@gluon.jit
def _numbers(
    scales, i_tile, i_round, first: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr,
    S: gl.constexpr, WHOLE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The scales (first = 0) or minima (2) [8 * 16] of a round, 0 beyond the weight."""
    o_n = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC))
    block = i_round * 8 + o_n // 16
    place = i_tile // 4
    o_block = block * 0
    if not WHOLE:
        place = place * STEPS
        o_block = block * (S * 32)
    p_tile = scales + place * (S * 32) + i_tile % 4 * 8
    o_number = o_block + (first + o_n % 16 // 8) * 32 + o_n % 8
    return gl.load(p_tile + o_number, mask=(block < STEPS) & (i_tile < TILES), other=0.0)


@gluon.jit
def _fetch(
    words, scales, i_tile, i_round, STEPS: gl.constexpr, TILES: gl.constexpr, S: gl.constexpr,
    WHOLE: gl.constexpr, MINIMA: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """All numbers of a round of a tile; without minima scales stand in their place."""
    b_words = _words(words, i_tile, i_round, STEPS, TILES)
    b_scales = _numbers(scales, i_tile, i_round, 0, STEPS, TILES, S, WHOLE, ACC)
    b_minima = b_scales
    if MINIMA:
        b_minima = _numbers(scales, i_tile, i_round, 2, STEPS, TILES, S, WHOLE, ACC)
    return b_words, b_scales, b_minima


@gluon.jit
def _tile_of(i_own, part: gl.constexpr, PAIR: gl.constexpr, UP: gl.constexpr):
    """The tile of the weight that is a part of a program's. UP: tiles from gates to ups, 0: nothing
    is gated."""
    if UP > 0:
        return i_own + part * UP
    return i_own * PAIR + part


@gluon.jit
def _added(b_total, one, b_x, b_sums, MINIMA: gl.constexpr, ACC: gl.constexpr):
    """The sums [8 * 16, 8] with those of a round: of the token's blocks `b_x` [128, 8], which add
    up to `b_sums` [8]."""
    b_words, b_scales, b_minima = one
    LESS: gl.constexpr = ABOVE if MINIMA else ABOVE + 8.0
    b_begin, _ = gl.broadcast((b_sums * -LESS)[None, :], b_total)
    b_acc = mma_v2(_operand(b_words, ACC), b_x, b_begin)
    b_total += b_scales.to(gl.float32)[:, None] * b_acc
    if MINIMA:
        b_total -= b_minima.to(gl.float32)[:, None] * b_sums[None, :]
    return b_total


@gluon.jit
def _own_sums(b_total, ACC: gl.constexpr):
    """[16] of the columns that are the warps' own."""
    o_n = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC))
    o_c = gl.arange(0, 8, layout=gl.SliceLayout(0, ACC))
    b_rows = gl.sum(gl.where(o_n[:, None] // 16 == o_c[None, :], b_total, 0.0), axis=1)
    return gl.sum(b_rows.reshape([8, 16]), axis=0)


@gluon.jit
def rows_kernel(
    words,
    scales,
    x,
    norm_weight,
    bias,
    y,
    eps,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    DEPTH: gl.constexpr,
    PAIR: gl.constexpr,
    WHOLE: gl.constexpr,
    MINIMA: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`words`, `scales` as layout.py has them, bfloat16, of blocks of STEPS. OUTPUTS are those of
    y: if GATED (by SiLU) the weight has twice as many, gates first. With ADD y is the residual."""
    S: gl.constexpr = 4 if MINIMA else 2
    UP: gl.constexpr = OUTPUTS // TILE if GATED else 0
    TILES: gl.constexpr = (OUTPUTS * (2 if GATED else 1) + TILE - 1) // TILE
    OWN: gl.constexpr = UP if GATED else (TILES + PAIR - 1) // PAIR
    ROUNDS: gl.constexpr = (STEPS + 8 * DEPTH - 1) // (8 * DEPTH) * DEPTH
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    BLOCKS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    token = gl.allocate_shared_memory(
        gl.bfloat16, [ROUNDS, 8, BLOCK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    sums = gl.allocate_shared_memory(gl.float32, [ROUNDS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i_program = gl.program_id(0)
    ring = ()  # the compiler of Triton knows no unpacking within a tuple
    for d in gl.static_range(DEPTH):
        for part in gl.static_range(PAIR):
            tile = _tile_of(i_program, part, PAIR, UP)
            one = _fetch(words, scales, tile, d, STEPS, TILES, S, WHOLE, MINIMA, ACC)
            ring = ring + (one,)  # noqa: RUF005 - Triton unpacks no tuples
    o_b = gl.arange(0, 8, layout=gl.SliceLayout(1, BLOCKS))
    o_x = o_b[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, BLOCKS))[None, :]
    norms = ()
    if NORM:
        for i in gl.static_range(ROUNDS):
            o_i = o_x + i * ROUND
            b_norm = gl.load(norm_weight + o_i, mask=o_i < INPUTS, other=0.0)
            norms = norms + (b_norm,)  # noqa: RUF005 - Triton unpacks no tuples
    enter(DEPENDENT)
    parts = ()
    for i in gl.static_range(ROUNDS):
        o_i = o_x + i * ROUND
        b_part = gl.load(x + o_i, mask=o_i < INPUTS, other=0.0)
        parts = parts + (b_part,)  # noqa: RUF005 - Triton unpacks no tuples
    b_squares = gl.zeros([8, BLOCK], gl.float32, BLOCKS)
    for i in gl.static_range(ROUNDS):
        b_part = parts[i]
        if NORM:
            b_wide = b_part.to(gl.float32)
            b_squares += b_wide * b_wide
            b_part = (b_wide * norms[i]).to(gl.bfloat16)
        token.index(i).store(b_part)
        sums.index(i).store(gl.sum(b_part.to(gl.float32), axis=1))
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(b_squares, axis=1), axis=0) / INPUTS + eps)
    thread_barrier()
    o_n = gl.arange(0, TILE, layout=gl.SliceLayout(0, BLOCKS))
    for i_own in range(i_program, OWN, PROGRAMS):
        b_total = gl.zeros([128, 8], gl.float32, ACC)
        b_up = gl.zeros([128, 8], gl.float32, ACC)
        o_out = _tile_of(i_own, 0, PAIR, UP) * TILE + o_n
        o_second = _tile_of(i_own, 1, PAIR, UP) * TILE + o_n
        b_old = gl.zeros([TILE], gl.float32, gl.SliceLayout(0, BLOCKS))
        b_old_up = b_old
        if ADD:
            b_old = gl.load(y + o_out, mask=o_out < OUTPUTS, other=0.0).to(gl.float32)
            if PAIR == 2 and not GATED:
                b_old_up = gl.load(y + o_second, mask=o_second < OUTPUTS, other=0.0).to(gl.float32)
        for base in range(0, ROUNDS, DEPTH):
            last = base + DEPTH >= ROUNDS
            i_next = gl.where(last, i_own + PROGRAMS, i_own)
            begin = gl.where(last, 0, base + DEPTH)
            after = ()
            for d in gl.static_range(DEPTH):
                for part in gl.static_range(PAIR):
                    # a gate beyond the last must not read an up
                    tile = gl.where(i_next < OWN, _tile_of(i_next, part, PAIR, UP), TILES)
                    one = _fetch(
                        words, scales, tile, begin + d, STEPS, TILES, S, WHOLE, MINIMA, ACC
                    )
                    after = after + (one,)  # noqa: RUF005 - Triton unpacks no tuples
                b_x = token.index(base + d).permute((1, 0)).load(SECOND)
                b_sums = sums.index(base + d).load(gl.SliceLayout(0, ACC))
                b_total = _added(b_total, ring[d * PAIR], b_x, b_sums, MINIMA, ACC)
                if PAIR == 2:
                    b_up = _added(b_up, ring[d * PAIR + 1], b_x, b_sums, MINIMA, ACC)
            ring = after
        b_y = gl.convert_layout(_own_sums(b_total, ACC), gl.SliceLayout(0, BLOCKS)) * factor
        m_n = o_out < OUTPUTS
        if BIAS:
            b_y += gl.load(bias + o_out, mask=m_n, other=0.0).to(gl.float32)
        if PAIR == 2:
            b_u = gl.convert_layout(_own_sums(b_up, ACC), gl.SliceLayout(0, BLOCKS)) * factor
            if BIAS:
                m_up = o_second < OUTPUTS * (2 if GATED else 1)
                b_u += gl.load(bias + o_second, mask=m_up, other=0.0).to(gl.float32)
            if GATED:
                b_y = b_y / (1.0 + gl.exp(-b_y)) * b_u
            else:
                gl.store(y + o_second, (b_u + b_old_up).to(gl.bfloat16), mask=o_second < OUTPUTS)
        gl.store(y + o_out, (b_y + b_old).to(gl.bfloat16), mask=m_n)
