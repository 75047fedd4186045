"""A token's groups of inputs as columns of the matrix instruction, in the registers of the warps of
triton_rows_int4.py: a column holds the inputs of one group, and zeros at those of others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def token_layout(group, whole):
    """A round's inputs of groups as columns of each warp hold them: [64, group], or (`whole`) all
    of a block [8, 128 / group, group, 8] by warp, group, input and column."""
    inputs = [1, *(1 << i for i in range(3, group.bit_length() - 1))]
    rank = 4 if whole else 2
    place = rank // 2

    def at(dim, number):
        return [number if i == dim else 0 for i in range(rank)]

    reg = [at(place, one) for one in inputs]
    lanes = [at(place, 2), at(place, 4)]
    if whole:
        reg += [at(1, 1 << i) for i in range((128 // group).bit_length() - 1)]
        lanes += [at(3, 1 << i) for i in range(3)]
        warps = [at(0, 1 << i) for i in range(3)]
        shape = [8, 128 // group, group, 8]
    else:
        lanes += [at(0, 1 << i) for i in range(3)]
        warps = [at(0, 8 << i) for i in range(3)]
        shape = [64, group]
    return gl.DistributedLinearLayout(reg, lanes, warps, [], shape)


@gluon.jit
def columns(b_own, b: gl.constexpr, GROUP: gl.constexpr, ACC: gl.constexpr):
    """[8, 128, 8]: of each warp's block `b` the inputs of groups in their columns, of what a round
    holds of them [64, GROUP]; the columns of other blocks' groups are zeros."""
    EACH: gl.constexpr = 128 // GROUP
    ALL: gl.constexpr = token_layout(GROUP, True)
    OWN: gl.constexpr = gl.SliceLayout(1, ALL)
    b_own = gl.convert_layout(
        b_own.reshape([8, 8, GROUP]).permute((0, 2, 1)), OWN, assert_trivial=True
    )
    o_g = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ALL))))
    o_c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ALL))))
    m_own = o_c[None, None, None, :] == o_g[None, :, None, None] + b * EACH
    b_mask, b_all = gl.broadcast(
        gl.where(m_own, -1, 0).to(gl.int16), b_own.to(gl.int16, bitcast=True).expand_dims(1)
    )
    b_all = gl.inline_asm_elementwise(  # two at once, which `where` is not
        "and.b32 $0, $1, $2;", "=r,r,r", [b_all, b_mask], dtype=gl.int16, is_pure=True, pack=2
    ).to(gl.bfloat16, bitcast=True)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    return gl.convert_layout(b_all.reshape([8, 128, 8]), SECOND, assert_trivial=True)
