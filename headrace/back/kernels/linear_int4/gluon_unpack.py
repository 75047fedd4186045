"""How the kernels of Hopper turn packed 4-bit integers into operands of the matrix instructions, in
registers: each thread's words hold just what it multiplies (layout.py).

Two integers become two bfloat16 numbers, or float16, by their place in the mantissa of 128 (1024);
what that adds is taken off exactly, and the scale is multiplied: 15 instructions for 8 weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def factors(first, word, apart):
    """What a word's pairs are multiplied by (or have added), of the outputs without bit 8 and with
    it: instructions that bring them into place, and their registers. $first and the next hold a
    number for each of the two words, which are the same unless `apart` (groups of sixteen)."""
    own = [f"${first + e1}" for e1 in range(2)]
    if not apart:
        return [], own
    names = [f"f{first + e1}" for e1 in range(2)]
    half = "0x3232" if word else "0x1010"
    pairs = zip(names, own, strict=True)
    return [f"prmt.b32 {name}, {one}, {one}, {half};" for name, one in pairs], names


@gluon.constexpr_function
def assembly(half, minima, apart):
    """Of two words ($8, $9) the eight pairs, with the scales of the outputs without bit 8 ($10) and
    with it ($11), and minima ($12, $13)."""
    kind = "f16x2" if half else "bf16x2"
    magic = "0x64006400" if half else "0x43004300"
    low = {"f16x2": ("0x64006400", "0x64086408"), "bf16x2": ("0x43004300", "0x43084308")}
    offset = low[kind][0 if minima else 1]
    lines = ["{ .reg .b32 w, c, f10, f11, f12, f13;", f"mov.b32 c, {offset};"]
    for word in range(2):
        more, scales = factors(10, word, apart)
        lines += more
        if minima:
            more, less = factors(12, word, apart)
            lines += more
        for pair in range(4):  # e1 + 2 e2
            out = f"${word * 4 + pair}"
            source = f"${8 + word}"
            if pair:
                lines.append(f"shr.b32 w, ${8 + word}, {4 * pair};")
                source = "w"
            lines.append(f"lop3.b32 {out}, {source}, 0x000f000f, {magic}, 0xea;")
            lines.append(f"sub.rn.{kind} {out}, {out}, c;")
            if minima:
                lines.append(f"fma.rn.{kind} {out}, {out}, {scales[pair % 2]}, {less[pair % 2]};")
            else:
                lines.append(f"mul.rn.{kind} {out}, {out}, {scales[pair % 2]};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def assembly_floats(apart):
    """The same of e2m1 numbers: a sign goes to bit 15 of its half, the other bits to where exponent
    and mantissa of bfloat16 meet. That is 2 ** -126 of the number, which the scales make up for
    (LIFT of layout.py): 38 instructions for 16 weights."""
    lines = ["{ .reg .b32 w, f10, f11;"]
    for word in range(2):
        source = f"${8 + word}"
        more, scales = factors(10, word, apart)
        lines += more
        for pair in range(4):  # e1 + 2 e2
            out, up = f"${word * 4 + pair}", 6 - 4 * pair
            if pair < 3:
                lines.append(f"shl.b32 w, {source}, {12 - 4 * pair};")
            lines.append(f"and.b32 {out}, {'w' if pair < 3 else source}, 0x80008000;")
            lines.append(f"{'shl' if up > 0 else 'shr'}.b32 w, {source}, {abs(up)};")
            lines.append(f"lop3.b32 {out}, w, 0x01c001c0, {out}, 0xea;")
            lines.append(f"mul.rn.bf16x2 {out}, {out}, {scales[pair % 2]};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def constraints(minima):
    """Of the same."""
    return ",".join(["=&r"] * 8 + ["r"] * (6 if minima else 4))


@gluon.constexpr_function
def word_layout():
    """A tile's block of words [32, 32]: four of a thread beside each other."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[32, 32],
    )


@gluon.constexpr_function
def split_layout():
    """The same by half block, output, lane of an output, and two bits of a lane's words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]],
        lane_bases=[[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]] + [[0, 1 << i, 0, 0, 0] for i in range(3)],
        warp_bases=[[0, 8, 0, 0, 0], [0, 16, 0, 0, 0]],
        block_bases=[],
        shape=[2, 32, 4, 2, 2],
    )


@gluon.constexpr_function
def scale_layout(groups):
    """The scales [groups, 32] of what a thread holds."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0] for i in range(groups.bit_length() - 1)],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[groups, 32],
    )


@gluon.jit
def _halves(b_numbers):
    """The first half of the numbers, and the second."""
    HALF: gl.constexpr = b_numbers.numel // 2
    return b_numbers.reshape([2, HALF]).permute((1, 0)).split()


@gluon.jit
def _spread(b_one, GROUPS: gl.constexpr):
    """The scales [groups * 32] of half the outputs, for every word."""
    HALVES: gl.constexpr = 2 if GROUPS > 1 else 1
    QUARTERS: gl.constexpr = 2 if GROUPS > 2 else 1
    SPLIT: gl.constexpr = split_layout()
    if GROUPS == 8:
        b_one = b_one.reshape([2, 2, 2, 32]).permute((0, 3, 1, 2))
        EACH: gl.constexpr = gl.SliceLayout(2, SPLIT)
        b_one = gl.convert_layout(b_one, EACH, assert_trivial=True).expand_dims(2)
    else:
        b_one = b_one.reshape([HALVES, QUARTERS, 32]).permute((0, 2, 1))
        OWN: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, SPLIT))
        b_one = gl.convert_layout(b_one, OWN, assert_trivial=True).expand_dims(2).expand_dims(4)
    b_all, _ = gl.broadcast(b_one, gl.zeros([2, 32, 4, 2, 2], b_one.dtype, SPLIT))
    return gl.convert_layout(b_all.reshape([32, 32]), word_layout(), assert_trivial=True)


@gluon.jit
def unpacked(
    b_words, b_numbers, MINIMA: gl.constexpr, GROUPS: gl.constexpr, ACC: gl.constexpr,
    FLOATS: gl.constexpr = False,
):  # fmt: skip
    """A tile's block of weights [64, 128] in registers, of words [32, 32] and the scales and minima
    [S, 32] of its GROUPS; of e2m1 numbers (FLOATS) 1 / 65536 of it."""
    dtype: gl.constexpr = b_numbers.dtype
    HALF: gl.constexpr = dtype == gl.float16
    APART: gl.constexpr = GROUPS == 8
    if MINIMA:
        b_scales, b_minima = _halves(b_numbers)
        b_m0, b_m1 = _halves(-b_minima)
        b_m0 = _spread(b_m0, GROUPS)
        b_m1 = _spread(b_m1, GROUPS)
    else:
        b_scales = b_numbers
    b_s0, b_s1 = _halves(b_scales)
    b_s0 = _spread(b_s0, GROUPS)
    b_s1 = _spread(b_s1, GROUPS)
    if FLOATS:
        p = gl.inline_asm_elementwise(
            assembly_floats(APART), constraints(False), [b_words, b_s0, b_s1],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif MINIMA:
        p = gl.inline_asm_elementwise(
            assembly(HALF, True, APART), constraints(True), [b_words, b_s0, b_s1, b_m0, b_m1],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p = gl.inline_asm_elementwise(
            assembly(HALF, False, APART), constraints(False), [b_words, b_s0, b_s1],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=2,
        )  # fmt: skip
    b_low = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
    b_high = gl.join(gl.join(p[4], p[5]), gl.join(p[6], p[7]))
    b_all = gl.join(b_low, b_high)
    # half block, warp, output, lane, upper sixteen inputs, e0, e1, e2, lower sixteen
    b_bits = b_all.reshape([2, 4, 8, 4, 2, 2, 2, 2, 2]).permute((1, 6, 2, 0, 4, 8, 7, 3, 5))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    b_weights = b_bits.reshape([64, 128]).to(dtype, bitcast=True)
    return gl.convert_layout(b_weights, OPERAND, assert_trivial=True)
