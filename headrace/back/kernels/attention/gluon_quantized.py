"""How the attention kernels of Hopper read a quantized cache: what triton_quantized.py is to the
others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.back.kernels.attention.triton_quantized import FP8_PAIRS, INT8


@gluon.jit
def load_scales(
    scales, b_block, b_head, o_token, own, slot, wanted,
    D: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    """Copies the scales of keys and values [N] (kv_write/quantized.py) of tokens of blocks and
    heads asynchronously, if wanted, and closes the group of copies. own: float32 [2 * slots, N]."""
    HEAD: gl.constexpr = BLOCK_TOKENS * (D + 4) // 4
    p_keys = scales + (b_block.to(gl.int64) * (2 * KV_HEADS) + b_head) * HEAD
    p_keys = p_keys + (BLOCK_TOKENS * D // 4 + o_token)
    if wanted:  # a mask would write zeros
        async_copy.async_copy_global_to_shared(own.index(slot * 2), p_keys)
        async_copy.async_copy_global_to_shared(own.index(slot * 2 + 1), p_keys + KV_HEADS * HEAD)
    async_copy.commit_group()


@gluon.jit
def dequantized(b_quantized, QUANTIZED: gl.constexpr):
    """Quantized int8 values as bfloat16; e4m3's in pairs."""
    if QUANTIZED == "fp8":
        b_dequantized = gl.inline_asm_elementwise(
            FP8_PAIRS, "=r,=r,r", [b_quantized], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        b_dequantized = gl.inline_asm_elementwise(
            INT8, "=r,=r,r", [b_quantized], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    return b_dequantized


@gluon.jit
def paired(b_x):
    """Columns in the order of pairs, or from it: of each four the second and the third
    exchanged."""
    X: gl.constexpr = b_x.shape[0]
    D: gl.constexpr = b_x.shape[1]
    return b_x.reshape([X, D // 4, 2, 2]).permute((0, 1, 3, 2)).reshape([X, D])


@gluon.constexpr_function
def lanes(rows, depth):
    """How a quantized tile [rows, D] is loaded: each thread sixteen beside each other of every row
    it holds in a matrix instruction."""
    more = [[0, 64]] if depth == 128 else []
    more += [[64, 0]] if rows == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *more],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, depth],
    )


@gluon.jit
def mixed(b_x):
    """Columns in the order in which a thread that has loaded sixteen values beside each other holds
    them for the matrix instruction, which wants two here and two there of each sixteen."""
    X: gl.constexpr = b_x.shape[0]
    D: gl.constexpr = b_x.shape[1]
    return b_x.reshape([X, D // 64, 4, 4, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([X, D])
