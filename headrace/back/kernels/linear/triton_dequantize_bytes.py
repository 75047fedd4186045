"""A weight of bytes, 8-bit integers or e4m3 numbers, dequantized as a whole in one pass over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch

BLOCK = 2048
"""Inputs of a program: 16 numbers a thread, which is one load."""


@triton.jit
def dequantize_bytes_kernel(
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
    o_g = i_o * ((INPUTS + GROUP - 1) // GROUP) + o_k // GROUP
    b_y = tl.load(values + i_o * INPUTS + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_y *= tl.load(scales + o_g, mask=m_k, other=0.0)
    if MINIMA:
        b_y -= tl.load(minima + o_g, mask=m_k, other=0.0)
    enter(DEPENDENT)
    tl.store(y + i_o * INPUTS + o_k, b_y.to(y.dtype.element_ty), mask=m_k)


def dequantize_into(
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    group: int | None,
    y_OI: torch.Tensor,
    minima_OG: torch.Tensor | None = None,
) -> None:
    """Writes the whole weight, which is dense, rounded to y's dtype once. `group` inputs share a
    scale, and a minimum that products are above the weight; None: all."""
    assert y_OI.is_contiguous() and y_OI.shape == values_OI.shape, y_OI.shape
    assert values_OI.is_contiguous() and scales_OG.is_contiguous(), values_OI.stride()
    outputs, inputs = values_OI.shape
    dequantize_bytes_kernel[outputs, triton.cdiv(inputs, BLOCK)](
        values_OI, scales_OG, minima_OG, y_OI, INPUTS=inputs, GROUP=group or inputs,
        MINIMA=minima_OG is not None, BLOCK=BLOCK, num_warps=4, **launch(y_OI.device),
    )  # fmt: skip
