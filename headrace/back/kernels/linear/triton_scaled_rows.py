"""Tokens quantized to e4m3 or int8 (scaled_rows.py), a norm or a gated activation before that if
asked: one program per token, which reads it once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.linear.scaled_rows import FLOAT8, LARGEST, ScaledRows
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.rows import norm_block
from headrace.back.kernels.triton.wrap import interpreted, launch

Quantize = Callable[[torch.Tensor], ScaledRows]


@triton.jit
def scaled_rows_kernel(
    x,
    norm_weight,
    values,
    scales,
    fixed,
    zero,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`values` [T, WIDTH], `scales` [T, ceil(WIDTH / GROUP)], both dense. ACTIVATION: x are WIDTH
    gates, then as many ups. `fixed` float32 [1]: the scale of all tokens, None: each has its
    own; `zero` the same: what is added to their integers."""
    i_row = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = BLOCK // GROUP
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    o_group = tl.arange(0, COUNT)
    o_i = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_i = o_i < WIDTH
    if NORM:
        b_weight = tl.load(norm_weight + o_i, mask=m_i, other=0.0)
    enter(DEPENDENT)
    p_x = x + i_row * x_stride + o_i
    b_x = tl.load(p_x, mask=m_i, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        b_up = tl.load(p_x + WIDTH, mask=m_i, other=0.0).to(tl.float32)
        b_x = (activate(b_x, ACTIVATION) * b_up).to(x.dtype.element_ty).to(tl.float32)
    if NORM:
        squares = tl.sum(tl.sum(b_x * b_x, axis=1), axis=0)
        b_x = b_x * tl.rsqrt(squares / WIDTH + eps) * b_weight
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    b_size = tl.abs(b_x)
    if INTEGERS:  # a NaN counts as inf, so that the scale becomes NaN
        b_size = tl.where(b_size == b_size, b_size, float("inf"))
    b_top = tl.max(b_size, axis=1)
    LEAST: tl.constexpr = -128.0 if INTEGERS and fixed is not None else -LARGEST
    if fixed is not None:
        b_scale = tl.zeros_like(b_top) + tl.load(fixed)
        b_values = tl.div_rn(b_x, tl.zeros_like(b_x) + b_scale[:, None])
        if zero is not None:
            b_values += tl.load(zero)
    else:
        b_inverse = tl.where(b_top > 1e-30, tl.div_rn(LARGEST, tl.maximum(b_top, 1e-30)), 0.0)
        b_values = b_x * b_inverse[:, None]
        b_scale = tl.div_rn(b_top, LARGEST)
    b_values = tl.minimum(tl.maximum(b_values, LEAST), LARGEST)
    if INTEGERS:
        b_values = tl.where(b_values == b_values, b_values, 0.0)
        b_values = (b_values + 12582912.0) - 12582912.0  # the nearest integer, ties to even
        b_scale = tl.where(b_top < float("inf"), b_scale, float("nan"))
    else:
        b_values = tl.where(b_x == b_x, b_values, b_x)  # a NaN stays one
    tl.store(values + i_row * WIDTH + o_i, b_values.to(values.dtype.element_ty), mask=m_i)
    tl.store(scales + i_row * GROUPS + o_group, b_scale, mask=o_group < GROUPS)


def bind(
    width: int,
    group: int | None,
    *,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype = FLOAT8,
    scale_1: torch.Tensor | None = None,
    zero_1: torch.Tensor | None = None,
    activation: str | None = None,
) -> Quantize:
    """The kernel for tokens of one width; `activation`: gates of that width and as many ups come
    before it."""
    block, warps = norm_block(width)
    share = block if group is None else group
    block = max(block, share)

    def quantize(x_TI: torch.Tensor) -> ScaledRows:
        read = width if activation is None else 2 * width
        assert x_TI.stride(1) == 1 and x_TI.shape[1] == read, (x_TI.shape, x_TI.stride())
        tokens = len(x_TI)
        # The interpreter does not round to the nearest e4m3 number: there torch does.
        stored = torch.float32 if interpreted() and dtype is FLOAT8 else dtype
        values = torch.empty(tokens, width, dtype=stored, device=x_TI.device)
        scales = torch.empty(
            tokens, triton.cdiv(width, share), dtype=torch.float32, device=x_TI.device
        )
        scaled_rows_kernel[(tokens,)](
            x_TI, norm_weight_I, values, scales, scale_1, zero_1, x_TI.stride(0), eps,
            WIDTH=width, BLOCK=block, GROUP=share, NORM=norm_weight_I is not None,
            ACTIVATION=activation or "", LARGEST=LARGEST[dtype], INTEGERS=dtype is torch.int8,
            num_warps=warps, **launch(x_TI.device),
        )  # fmt: skip
        return ScaledRows(values.to(dtype), scales)

    return quantize
