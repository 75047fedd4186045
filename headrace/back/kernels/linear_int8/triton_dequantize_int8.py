"""A weight of 8-bit integers as a whole, dequantized in one pass over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.linear_int8.layout import Int8Weight
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch

BLOCK = 2048
"""Inputs of a program: 16 integers a thread, which is one load."""


@triton.jit
def dequantize_int8_kernel(
    values,
    scales,
    minima,
    y,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y [O, INPUTS], dense: a part of an output each program."""
    i_o = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < INPUTS
    o_g = i_o * (INPUTS // GROUP) + o_k // GROUP
    b_y = tl.load(values + i_o * INPUTS + o_k, mask=m_k, other=0).to(tl.float32)
    b_y *= tl.load(scales + o_g, mask=m_k, other=0.0)
    if MINIMA:
        b_y -= tl.load(minima + o_g, mask=m_k, other=0.0)
    enter(DEPENDENT)
    tl.store(y + i_o * INPUTS + o_k, b_y.to(y.dtype.element_ty), mask=m_k)


def dequantize_into(weight: Int8Weight, y_OI: torch.Tensor) -> None:
    """Writes the whole weight, which is dense, rounded to y's dtype once."""
    assert y_OI.is_contiguous() and y_OI.shape == weight.values_OI.shape, y_OI.shape
    assert weight.values_OI.is_contiguous(), weight.values_OI.stride()
    dequantize_int8_kernel[weight.outputs, triton.cdiv(weight.inputs, BLOCK)](
        weight.values_OI, weight.scales_OG, weight.minima_OG, y_OI, INPUTS=weight.inputs,
        GROUP=weight.group or weight.inputs, MINIMA=weight.minima_OG is not None, BLOCK=BLOCK,
        num_warps=4, **launch(y_OI.device),
    )  # fmt: skip
