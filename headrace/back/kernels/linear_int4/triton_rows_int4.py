"""One token times a weight of 4-bit integers on Hopper, without a word between programs: a program
takes sixteen outputs at a time (a PAIR thirty-two, or gates and ups) with all their inputs.

Eight warps share the inputs: in a round of 1024 each has its own block of 128, and the token's
blocks are the columns of the matrix instruction, of which every warp keeps its own. Words go from
memory to registers, DEPTH rounds ahead, the first of them from before the kernel it waits for has
ended.

Integers become bfloat16 numbers above 128 with two instructions for two of them. What that adds is
taken off the sums, which begin with minus as much times the sum of a block's inputs; scales (and
minima) of 128 inputs or of all are applied to a block's sums.

Where a GROUP of fewer inputs shares a scale, a warp's eight columns are eight groups of its own,
one behind the other: a column holds the inputs of its group and zeros at those of the others, so
that a product of the matrix instruction is the sums of eight groups, each with its scale (and
minimum) at the thread that holds it. A round is then 64 groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from headrace.back.kernels.linear_int4.gluon_columns import columns, token_layout
from headrace.back.kernels.triton.gluon import enter, thread_barrier

TILE = gl.constexpr(16)
BLOCK = gl.constexpr(128)
WARPS = gl.constexpr(8)
COLUMNS = gl.constexpr(8)
"""Of the matrix instruction."""
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
def _operand(b_words, GROUP: gl.constexpr, ACC: gl.constexpr):
    """The integers of a block of each warp, 128 above what is stored, as the matrix instruction
    takes them: [8 * 16, 128], or [8, 16, 128]."""
    p = gl.inline_asm_elementwise(
        assembly(), constraints(), [b_words],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True, pack=2,
    )  # fmt: skip
    b_low = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
    b_high = gl.join(gl.join(p[4], p[5]), gl.join(p[6], p[7]))
    # warp, half block, output, lane, upper sixteen inputs, e0, e1, e2, lower sixteen
    b_bits = gl.join(b_low, b_high).reshape([8, 2, 8, 4, 2, 2, 2, 2, 2])
    b_bits = b_bits.permute((0, 6, 2, 1, 4, 8, 7, 3, 5))
    if GROUP > 0:
        b_bits = b_bits.reshape([8, 16, 128])
    else:
        b_bits = b_bits.reshape([128, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    return gl.convert_layout(b_bits.to(gl.bfloat16, bitcast=True), OPERAND, assert_trivial=True)


@gluon.jit
def _words(words, i_tile, i_round, b, PER: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr):
    """The words of a tile of sixteen of each warp's block `b` of PER, 0 beyond the weight."""
    LAYOUT: gl.constexpr = word_layout()
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    o_col = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    block = (i_round * 8 + o_row // 8) * PER + b
    o_word = block * 1024 + o_row // 4 % 2 * 512 + o_row % 4 * 32
    p_words = words + (i_tile // 4 * (STEPS * 1024) + i_tile % 4 * 128)
    m_row = (block < STEPS) & (i_tile < TILES)
    return gl.load(p_words + (o_word[:, None] + o_col[None, :]), mask=m_row[:, None], other=0)


@gluon.jit
def _numbers(
    scales, i_tile, i_round, part: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr,
    S: gl.constexpr, WHOLE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The scales (part = 0) or minima (1) [8 * 16] of a round, 0 beyond the weight."""
    o_n = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC))
    block = i_round * 8 + o_n // 16
    place = i_tile // 4
    o_block = block * 0
    if not WHOLE:
        place = place * STEPS
        o_block = block * (S * 32)
    p_tile = scales + place * (S * 32) + i_tile % 4 * 8
    o_number = o_block + (part * 2 + o_n % 16 // 8) * 32 + o_n % 8
    return gl.load(p_tile + o_number, mask=(block < STEPS) & (i_tile < TILES), other=0.0)


@gluon.jit
def _group_numbers(
    scales, i_tile, i_round, part: gl.constexpr, PER: gl.constexpr, STEPS: gl.constexpr,
    TILES: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The same [8, 16, 8] of each warp's eight groups, COLUMNS // PER of a block."""
    EACH: gl.constexpr = COLUMNS // PER
    o_w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None, None]
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    o_c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    block = (i_round * 8 + o_w) * PER + o_c // EACH
    p_tile = scales + i_tile // 4 * (STEPS * S * 32) + i_tile % 4 * 8
    o_row = (part * 2 + o_n // 8) * (EACH * 32) + o_n % 8
    o_number = block * (S * 32) + o_c % EACH * 32 + o_row
    m_number = (block < STEPS) & (o_n < 16) & (i_tile < TILES)
    return gl.load(p_tile + o_number, mask=m_number, other=0.0)


@gluon.jit
def _fetch(
    words, scales, i_tile, i_round, GROUP: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr,
    S: gl.constexpr, WHOLE: gl.constexpr, MINIMA: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """All numbers of a round of a tile: scales, minima (without them scales in their place), and
    the words of each of a warp's blocks."""
    PER: gl.constexpr = GROUP // 16 if GROUP > 0 else 1
    if GROUP > 0:
        b_scales = _group_numbers(scales, i_tile, i_round, 0, PER, STEPS, TILES, S, ACC)
    else:
        b_scales = _numbers(scales, i_tile, i_round, 0, STEPS, TILES, S, WHOLE, ACC)
    b_minima = b_scales
    if MINIMA:
        if GROUP > 0:
            b_minima = _group_numbers(scales, i_tile, i_round, 1, PER, STEPS, TILES, S, ACC)
        else:
            b_minima = _numbers(scales, i_tile, i_round, 1, STEPS, TILES, S, WHOLE, ACC)
    one = (b_scales, b_minima)
    for b in gl.static_range(PER):
        b_words = _words(words, i_tile, i_round, b, PER, STEPS, TILES)
        one = one + (b_words,)  # noqa: RUF005 - Triton unpacks no tuples
    return one


@gluon.jit
def _tile_of(i_own, part: gl.constexpr, PAIR: gl.constexpr, UP: gl.constexpr):
    """The tile of the weight that is a part of a program's. UP: tiles from gates to ups, 0: nothing
    is gated."""
    if UP > 0:
        return i_own + part * UP
    return i_own * PAIR + part


@gluon.jit
def _inputs(token, sums, i_round, GROUP: gl.constexpr, ACC: gl.constexpr):
    """What a round multiplies: the token's blocks [128, 8], or columns of each of a warp's blocks;
    last what they add up to, [8] or [8, 8]."""
    if GROUP > 0:
        TOKEN: gl.constexpr = token_layout(GROUP, False)
        b_own = token.index(i_round).load(TOKEN)
        b_sums = sums.index(i_round).load(gl.SliceLayout(1, ACC))
        one = ()
        for b in gl.static_range(GROUP // 16):
            one = one + (columns(b_own, b, GROUP, ACC),)  # noqa: RUF005 - Triton unpacks no tuples
        return one + (b_sums,)  # noqa: RUF005 - Triton unpacks no tuples
    else:
        b_x = token.index(i_round).permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))
        return b_x, sums.index(i_round).load(gl.SliceLayout(0, ACC))


@gluon.jit
def _added(b_total, one, inputs, GROUP: gl.constexpr, MINIMA: gl.constexpr, ACC: gl.constexpr):
    """The sums [8 * 16, 8], or [8, 16, 8], with those of a round: its numbers and its inputs."""
    LESS: gl.constexpr = ABOVE if MINIMA else ABOVE + 8.0
    PER: gl.constexpr = GROUP // 16 if GROUP > 0 else 1
    b_sums = inputs[PER]
    if GROUP > 0:
        b_sums = b_sums.expand_dims(1)
        b_scales = one[0].to(gl.float32)
        b_minima = one[1].to(gl.float32)
    else:
        b_sums = b_sums[None, :]
        b_scales = one[0].to(gl.float32)[:, None]
        b_minima = one[1].to(gl.float32)[:, None]
    b_acc, _ = gl.broadcast(b_sums * -LESS, b_total)
    for b in gl.static_range(PER):
        b_acc = mma_v2(_operand(one[2 + b], GROUP, ACC), inputs[b], b_acc)
    b_total += b_scales * b_acc
    if MINIMA:
        b_total -= b_minima * b_sums
    return b_total


@gluon.jit
def _own_sums(b_total, GROUP: gl.constexpr, ACC: gl.constexpr):
    """[16] of the columns that are the warps' own."""
    if GROUP > 0:
        return gl.sum(gl.sum(b_total, axis=2), axis=0)
    else:
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
    GROUP: gl.constexpr,
    WHOLE: gl.constexpr,
    MINIMA: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`words`, `scales` as layout.py has them, bfloat16, of blocks of STEPS. GROUP: inputs that
    share a scale, 0: those of a block, or all (WHOLE). OUTPUTS are those of y: if GATED (by SiLU)
    the weight has twice as many, gates first. With ADD y is the residual."""
    S: gl.constexpr = (2 * COLUMNS * 16 // GROUP if GROUP > 0 else 2) * (2 if MINIMA else 1)
    UP: gl.constexpr = OUTPUTS // TILE if GATED else 0
    TILES: gl.constexpr = (OUTPUTS * (2 if GATED else 1) + TILE - 1) // TILE
    OWN: gl.constexpr = UP if GATED else (TILES + PAIR - 1) // PAIR
    PER: gl.constexpr = 8 * DEPTH * (GROUP // 16 if GROUP > 0 else 1)
    ROUNDS: gl.constexpr = (STEPS + PER - 1) // PER * DEPTH
    # rows of a round that have a sum, and inputs of each
    C: gl.constexpr = 64 if GROUP > 0 else 8
    R: gl.constexpr = GROUP if GROUP > 0 else BLOCK
    FLAT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
    CUBE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
    ACC: gl.constexpr = CUBE if GROUP > 0 else FLAT
    BLOCKS: gl.constexpr = gl.BlockedLayout([1, 4], [BLOCK // R, R // 4], [8, 1], [1, 0])
    PHASES: gl.constexpr = 1 if GROUP > 0 else 8
    token = gl.allocate_shared_memory(
        gl.bfloat16, [ROUNDS, C, R], gl.SwizzledSharedLayout(8, 1, PHASES, [1, 0])
    )
    SUMS: gl.constexpr = [ROUNDS, 8, 8] if GROUP > 0 else [ROUNDS, 8]
    ORDER: gl.constexpr = [1, 0] if GROUP > 0 else [0]
    sums = gl.allocate_shared_memory(gl.float32, SUMS, gl.SwizzledSharedLayout(1, 1, 1, ORDER))
    i_program = gl.program_id(0)
    ring = ()  # the compiler of Triton knows no unpacking within a tuple
    for d in gl.static_range(DEPTH):
        for part in gl.static_range(PAIR):
            tile = _tile_of(i_program, part, PAIR, UP)
            one = _fetch(words, scales, tile, d, GROUP, STEPS, TILES, S, WHOLE, MINIMA, ACC)
            ring = ring + (one,)  # noqa: RUF005 - Triton unpacks no tuples
    o_b = gl.arange(0, C, layout=gl.SliceLayout(1, BLOCKS))
    o_x = o_b[:, None] * R + gl.arange(0, R, layout=gl.SliceLayout(0, BLOCKS))[None, :]
    norms = ()
    if NORM:
        for i in gl.static_range(ROUNDS):
            o_i = o_x + i * (C * R)
            b_norm = gl.load(norm_weight + o_i, mask=o_i < INPUTS, other=0.0)
            norms = norms + (b_norm,)  # noqa: RUF005 - Triton unpacks no tuples
    enter(DEPENDENT)
    parts = ()
    for i in gl.static_range(ROUNDS):
        o_i = o_x + i * (C * R)
        b_part = gl.load(x + o_i, mask=o_i < INPUTS, other=0.0)
        parts = parts + (b_part,)  # noqa: RUF005 - Triton unpacks no tuples
    b_squares = gl.zeros([C, R], gl.float32, BLOCKS)
    for i in gl.static_range(ROUNDS):
        b_part = parts[i]
        if NORM:
            b_wide = b_part.to(gl.float32)
            b_squares += b_wide * b_wide
            b_part = (b_wide * norms[i]).to(gl.bfloat16)
        token.index(i).store(b_part)
        b_sums = gl.sum(b_part.to(gl.float32), axis=1)
        if GROUP > 0:
            b_sums = b_sums.reshape([8, 8])
        sums.index(i).store(b_sums)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(b_squares, axis=1), axis=0) / INPUTS + eps)
    thread_barrier()
    o_n = gl.arange(0, TILE, layout=gl.SliceLayout(0, BLOCKS))
    for i_own in range(i_program, OWN, PROGRAMS):
        if GROUP > 0:
            b_total = gl.zeros([8, 16, 8], gl.float32, ACC)
        else:
            b_total = gl.zeros([128, 8], gl.float32, ACC)
        b_up = b_total
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
                        words, scales, tile, begin + d, GROUP, STEPS, TILES, S, WHOLE, MINIMA, ACC
                    )
                    after = after + (one,)  # noqa: RUF005 - Triton unpacks no tuples
                inputs = _inputs(token, sums, base + d, GROUP, ACC)
                b_total = _added(b_total, ring[d * PAIR], inputs, GROUP, MINIMA, ACC)
                if PAIR == 2:
                    b_up = _added(b_up, ring[d * PAIR + 1], inputs, GROUP, MINIMA, ACC)
            ring = after
        b_y = gl.convert_layout(_own_sums(b_total, GROUP, ACC), gl.SliceLayout(0, BLOCKS)) * factor
        m_n = o_out < OUTPUTS
        if BIAS:
            b_y += gl.load(bias + o_out, mask=m_n, other=0.0).to(gl.float32)
        if PAIR == 2:
            b_u = gl.convert_layout(_own_sums(b_up, GROUP, ACC), gl.SliceLayout(0, BLOCKS)) * factor
            if BIAS:
                m_up = o_second < OUTPUTS * (2 if GATED else 1)
                b_u += gl.load(bias + o_second, mask=m_up, other=0.0).to(gl.float32)
            if GATED:
                b_y = b_y / (1.0 + gl.exp(-b_y)) * b_u
            else:
                gl.store(y + o_second, (b_u + b_old_up).to(gl.bfloat16), mask=o_second < OUTPUTS)
        gl.store(y + o_out, (b_y + b_old).to(gl.bfloat16), mask=m_n)
