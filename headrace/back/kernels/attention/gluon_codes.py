"""How the attention kernels of Hopper read a cache of codes: what triton_codes.py is to the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.back.kernels.attention.triton_codes import FP8_PAIRS, INT8


@gluon.jit
def ask_scales(
    scales, b_block, b_head, o_token, own, slot, wanted,
    D: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """Asks for the scales of keys and values [N] (coded.py) of tokens of blocks and heads, if wanted, and closes the
    group of copies. own: float32 [2 * slots, N]."""
    HEAD: gl.constexpr = BLOCK_TOKENS * (D + 4) // 4
    p_keys = scales + (b_block.to(gl.int64) * (2 * KV_HEADS) + b_head) * HEAD
    p_keys = p_keys + (BLOCK_TOKENS * D // 4 + o_token)
    if wanted:  # a mask would write zeros
        async_copy.async_copy_global_to_shared(own.index(slot * 2), p_keys)
        async_copy.async_copy_global_to_shared(own.index(slot * 2 + 1), p_keys + KV_HEADS * HEAD)
    async_copy.commit_group()


@gluon.jit
def widened(b_codes, CODED: gl.constexpr):
    """Codes int8 as bfloat16; e4m3's in pairs."""
    if CODED == "fp8":
        b_wide = gl.inline_asm_elementwise(
            FP8_PAIRS, "=r,=r,r", [b_codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        b_wide = gl.inline_asm_elementwise(
            INT8, "=r,=r,r", [b_codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    return b_wide


@gluon.jit
def paired(b_x):
    """Columns in the order of pairs, or from it: of each four the second and the third exchanged."""
    X: gl.constexpr = b_x.shape[0]
    D: gl.constexpr = b_x.shape[1]
    return b_x.reshape([X, D // 4, 2, 2]).permute((0, 1, 3, 2)).reshape([X, D])
