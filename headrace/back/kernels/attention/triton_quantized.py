"""How the attention kernels read a quantized cache (kernels/kv_write/quantized.py).

Scales stay out of the tiles: those of keys go onto the scores, those of values onto the weights. On
NVIDIA's GPUs four values become four bfloat16 by ten instructions, none of them a conversion, of
which there are few a cycle. Both ways are exact. Quantized V tiles are dequantized where they were
loaded, before the conversion to the layout of the matrix units, since only 16-bit elements can be
transposed on the way from shared memory: hence the two forms of one instruction sequence, one of
which the compiler may not move.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8 = tl.constexpr(
    # -128 .. 127 as two numbers that are exact: 128 + the low seven bits, less 128 or 256 by the
    # sign.
    """{
    .reg .b32 low, sign, a, b;
    and.b32 low, $2, 0x7f7f7f7f;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 a, low, 0x43434343, 0x4140;
    prmt.b32 b, sign, 0x43434343, 0x4140;
    sub.bf16x2 $0, a, b;
    prmt.b32 a, low, 0x43434343, 0x4342;
    prmt.b32 b, sign, 0x43434343, 0x4342;
    sub.bf16x2 $1, a, b;
    }"""
)
FP8 = tl.constexpr(
    # Exponent and mantissa moved to bfloat16's places mean the number times 2^-120, subnormal ones
    # too.
    """{
    .reg .b32 a, b, big, none;
    mov.b32 big, 0x7b807b80;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    shr.u32 b, a, 4;
    and.b32 b, b, 0x07f007f0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    fma.rn.bf16x2 $0, a, big, none;
    prmt.b32 a, $2, 0, 0x3424;
    shr.u32 b, a, 4;
    and.b32 b, b, 0x07f007f0;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    fma.rn.bf16x2 $1, a, big, none;
    }"""
)
FP8_PAIRS = tl.constexpr(
    # The same times 2^-120, the second value and the third exchanged, so that only shifts and masks
    # are left. A NaN becomes a number.
    """{
    .reg .b32 a, b;
    shr.u32 a, $2, 4;
    and.b32 a, a, 0x07f007f0;
    lop3.b32 $1, $2, 0x80008000, a, 0xea;
    mul.lo.u32 a, $2, 16;
    and.b32 a, a, 0x07f007f0;
    mul.lo.u32 b, $2, 256;
    lop3.b32 $0, b, 0x80008000, a, 0xea;
    }"""
)
PAIRS_UP = tl.constexpr(2.0**60)
"""What each side of a product with such values is multiplied by, half of what they lack."""
SCALED = tl.constexpr(
    # Times a scale in two parts, of which the lower counts for less than half a place of the
    # higher: rounded once.
    """{
    .reg .b32 low;
    mul.rn.bf16x2 low, $1, $3;
    fma.rn.bf16x2 $0, $1, $2, low;
    }"""
)


@triton.jit
def scale_pointers(
    scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Where the scales of the quantized keys at positions `o_n` are; strides count bytes."""
    p_head = scales + i_head.to(tl.int64) * (head_stride // 4)
    p_block = p_head + b_block * (block_stride // 4)
    return p_block + BLOCK_TOKENS * HEAD_DIM // 4 + o_n % BLOCK_TOKENS


@triton.jit
def dequantized(b_quantized, dtype: tl.constexpr, MOVES: tl.constexpr, BITS: tl.constexpr):
    """The quantized values as numbers. `BITS`: by the sequences above, which make bfloat16 of
    them."""
    if not BITS:
        b_dequantized = b_quantized.to(dtype)
    elif b_quantized.dtype == tl.int8:
        b_dequantized = tl.inline_asm_elementwise(
            INT8, "=r,=r,r", [b_quantized], dtype=tl.bfloat16, is_pure=MOVES, pack=4
        )
    else:
        b_quantized = b_quantized.to(tl.int8, bitcast=True)
        b_dequantized = tl.inline_asm_elementwise(
            FP8, "=r,=r,r", [b_quantized], dtype=tl.bfloat16, is_pure=MOVES, pack=4
        )
    return b_dequantized
