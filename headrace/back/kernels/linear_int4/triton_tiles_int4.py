"""GEMMs with weights of 4-bit integers by tl.dot on any GPU, and the dequantization of a whole
weight for the library's GEMM.

A program takes 64 outputs (or their gates and ups) and M tokens in steps of K inputs; words are
read as they lie (layout.py), and put into order by the compiler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.linear_int4.layout import BLOCK, LIFT, Int4Weight, block_groups
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import launch, power_of_two
from headrace.base.config.levels import LEVELS

LEAST_TOKENS = 16
MOST_TOKENS = 64
"""Of a program."""
LOWER = tl.constexpr(1 / LIFT)
NF4, FP4 = tl.constexpr(LEVELS["nf4"]), tl.constexpr(LEVELS["fp4"])
FLOATS = {"e2m1": 1, "nf4": 2, "fp4": 3}
"""What kernels know levels by; 0: integers."""


@triton.jit
def _spread(p_scales, K: tl.constexpr, GROUPS: tl.constexpr):
    """One of the rows of scales of a block [64, 128]: outputs with and without bit 8."""
    o_e = tl.arange(0, 2)[None, :, None, None, None]
    o_w = tl.arange(0, 4)[:, None, None, None, None] * 8
    o_g = tl.arange(0, 8)[None, None, :, None, None]
    o_group = tl.arange(0, GROUPS)[None, None, None, :, None]
    b_scales = tl.load(p_scales + (o_e * GROUPS + o_group) * 32 + o_w + o_g).to(tl.float32)
    b_all = tl.broadcast_to(b_scales, [4, 2, 8, GROUPS, K // GROUPS])
    return tl.reshape(b_all, [64, K])


@triton.jit
def e2m1(b_bits):
    """The numbers of e2m1 bits (int32): sign, two bits of exponent, one of mantissa."""
    b_exponent = (b_bits >> 1) & 3
    b_mantissa = (b_bits & 1).to(tl.float32) * 0.5
    b_power = tl.where(b_exponent > 1, b_exponent, 1) - 1
    b_whole = tl.where(b_exponent > 0, 1.0, 0.0) + b_mantissa
    b_size = b_whole * (1 << b_power).to(tl.float32)
    return tl.where(b_bits > 7, -b_size, b_size)


@triton.jit
def _half_of_levels(b_bits, TABLE: tl.constexpr):
    """Of 16 levels those of bits 8 to 15 at 0 to 7."""
    b = tl.zeros_like(b_bits).to(tl.float32)
    for i in tl.static_range(8):
        b = tl.where(b_bits == i, TABLE[8 + i], b)
    return b


@triton.jit
def levels(b_bits, TABLE: tl.constexpr):
    """The levels of a table at bits 0 .. 15 (int32)."""
    b = _half_of_levels(b_bits - 8, TABLE)
    for i in tl.static_range(8):
        b = tl.where(b_bits == i, TABLE[i], b)
    return b


@triton.jit
def numbers_of(p_words):
    """The numbers 0 .. 15 of a block [64, 128], int32."""
    b_words = tl.reshape(tl.load(p_words + tl.arange(0, 1024)), [2, 4, 8, 4, 4, 1, 1, 1])
    o_0 = tl.arange(0, 2)[None, None, None, None, None, :, None, None] * 16
    o_2 = tl.arange(0, 2)[None, None, None, None, None, None, :, None] * 8
    o_1 = tl.arange(0, 2)[None, None, None, None, None, None, None, :] * 4
    b_values = (b_words >> (o_0 + o_2 + o_1)) & 15
    # half block, warp, output, lane, sixteen inputs, e0, e2, e1
    b_values = tl.permute(b_values, (1, 7, 2, 0, 4, 6, 3, 5))
    return tl.reshape(b_values, [64, 128])


@triton.jit
def block_of(
    p_words, p_scales, GROUPS: tl.constexpr, MINIMA: tl.constexpr, FLOATS: tl.constexpr = False
):
    """The weights of a block [64, 128], float32."""
    b_values = numbers_of(p_words)
    b_scales = _spread(p_scales, 128, GROUPS)
    if FLOATS:
        if p_scales.dtype.element_ty == tl.bfloat16:
            b_scales = b_scales * LOWER
        if FLOATS == 2:
            return levels(b_values, NF4) * b_scales
        elif FLOATS == 3:
            return levels(b_values, FP4) * b_scales
        else:
            return e2m1(b_values) * b_scales
    b_values = b_values.to(tl.float32)
    if MINIMA:
        return b_values * b_scales - _spread(p_scales + GROUPS * 64, 128, GROUPS)
    else:
        return (b_values - 8.0) * b_scales


@triton.jit(do_not_specialize=["num_tokens"])
def tiles_kernel(
    x,
    words,
    scales,
    bias,
    y,
    num_tokens,
    x_stride,
    y_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    MINIMA: tl.constexpr,
    FLOATS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """OUTPUTS are those of y: with ACTIVATION the weight has twice as many, gates first (a multiple
    of 64 then). With ADD y is the residual. STEPS: blocks of 128 inputs."""
    S: tl.constexpr = GROUPS * (128 if MINIMA else 64)
    UP: tl.constexpr = OUTPUTS // 64
    NEXT: tl.constexpr = 0 if WHOLE else S
    GATED: tl.constexpr = ACTIVATION != ""
    i_n = tl.program_id(0)
    i_tile = i_n.to(tl.int64)
    o_m = tl.program_id(1) * M + tl.arange(0, M)
    o_n = i_n * 64 + tl.arange(0, 64)
    o_k = tl.arange(0, 128)
    m_m = o_m < num_tokens
    m_n = o_n < OUTPUTS
    p_words = words + i_tile * (STEPS * 1024)
    p_scales = scales + i_tile * (S if WHOLE else STEPS * S)
    p_up = words + (i_tile + UP) * (STEPS * 1024)
    p_up_scales = scales + (i_tile + UP) * (S if WHOLE else STEPS * S)
    enter(DEPENDENT)
    p_x = x + o_m[:, None].to(tl.int64) * x_stride + o_k[None, :]
    b_acc = tl.zeros([64, M], tl.float32)
    b_up = tl.zeros([64, M], tl.float32)
    for i in range(0, STEPS):
        m_k = i * 128 + o_k < INPUTS
        b_x = tl.load(p_x + i * 128, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_weight = block_of(p_words + i * 1024, p_scales + i * NEXT, GROUPS, MINIMA, FLOATS)
        b_acc = tl.dot(b_weight.to(b_x.dtype), tl.trans(b_x), b_acc, input_precision="ieee")
        if GATED:
            b_weight_up = block_of(p_up + i * 1024, p_up_scales + i * NEXT, GROUPS, MINIMA, FLOATS)
            b_up = tl.dot(b_weight_up.to(b_x.dtype), tl.trans(b_x), b_up, input_precision="ieee")
    if BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            b_up += tl.load(bias + OUTPUTS + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_acc = activate(b_acc, ACTIVATION) * b_up
    m_y = m_n[:, None] & m_m[None, :]
    p_y = y + o_m[None, :].to(tl.int64) * y_stride + o_n[:, None]
    if ADD:
        b_acc += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_y)


@triton.jit
def dequantize_kernel(
    words,
    scales,
    y,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    MINIMA: tl.constexpr,
    FLOATS: tl.constexpr,
    INTEGERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y [OUTPUTS, INPUTS], dense: a block of a tile each program. INTEGERS: the numbers alone,
    without their scales."""
    S: tl.constexpr = GROUPS * (128 if MINIMA else 64)
    i_k = tl.program_id(0)
    i_tile = tl.program_id(1).to(tl.int64)
    i_block = i_tile * STEPS + i_k
    p_scales = scales + (i_tile if WHOLE else i_block) * S
    if INTEGERS:
        b_weight = numbers_of(words + i_block * 1024) - 8
    else:
        b_weight = block_of(words + i_block * 1024, p_scales, GROUPS, MINIMA, FLOATS)
    o_n = i_tile * 64 + tl.arange(0, 64)
    o_k = i_k * 128 + tl.arange(0, 128)
    m_y = (o_n < OUTPUTS)[:, None] & (o_k < INPUTS)[None, :]
    enter(DEPENDENT)
    p_y = y + o_n[:, None] * INPUTS + o_k[None, :]
    tl.store(p_y, b_weight.to(y.dtype.element_ty), mask=m_y)


def _constants(weight: Int4Weight) -> dict[str, int | bool]:
    return {
        "STEPS": weight.words_NBW.shape[1],
        "GROUPS": block_groups(weight.group),
        "WHOLE": weight.group is None,
        "MINIMA": weight.minima,
        "FLOATS": FLOATS[weight.levels] if weight.floats else 0,
    }


def multiply(
    x_TI: torch.Tensor,
    weight: Int4Weight,
    bias_O: torch.Tensor | None,
    y_TY: torch.Tensor,
    *,
    activation: str,
    add: bool,
    most_tokens: int = MOST_TOKENS,
) -> None:
    """Writes y, or adds into it."""
    assert x_TI.stride(1) == y_TY.stride(1) == 1, (x_TI.stride(), y_TY.stride())
    tokens, results = y_TY.shape
    m = min(most_tokens, power_of_two(tokens, least=LEAST_TOKENS))
    rows = 128 if activation else 64
    tiles_kernel[triton.cdiv(results, 64), triton.cdiv(tokens, m)](
        x_TI, weight.words_NBW, weight.scales_NBSR, bias_O, y_TY, tokens, x_TI.stride(0),
        y_TY.stride(0), INPUTS=weight.inputs, OUTPUTS=results, M=m, BIAS=bias_O is not None,
        ACTIVATION=activation, ADD=add, **_constants(weight), num_warps=4,
        num_stages=fitting_stages(3, (m + rows) * BLOCK * x_TI.element_size()),
        **launch(y_TY.device),
    )  # fmt: skip


def dequantize_into(weight: Int4Weight, y_OI: torch.Tensor) -> None:
    """Writes the whole weight, which is dense; of int8 its integers alone."""
    assert y_OI.is_contiguous() and y_OI.shape == (weight.outputs, weight.inputs), y_OI.shape
    tiles, blocks, _ = weight.words_NBW.shape
    dequantize_kernel[blocks, tiles](
        weight.words_NBW, weight.scales_NBSR, y_OI, INPUTS=weight.inputs, OUTPUTS=weight.outputs,
        INTEGERS=y_OI.dtype is torch.int8, **_constants(weight), num_warps=4,
        **launch(y_OI.device),
    )  # fmt: skip
