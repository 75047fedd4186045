"""Tokens quantized to e4m3 or int8 (scaled_rows.py), a norm or a gated activation before that if
asked. One program per token, which reads it once; where groups share a scale and there is no norm,
a program for each part of a token; wide tokens without either are read twice, the second time from
the cache, so that many programs run beside each other."""

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
WIDE, MANY = 8192, 512
"""Wider tokens of one scale are read twice, if there are so many: programs that hold a whole token
in registers are alone on a multiprocessor (H200, 8,192 tokens of 12,288 gates and ups: twice the
time of their bytes)."""
CHUNK, CHUNK_WARPS = 4096, 16
"""Few enough tokens at a time for the second-level cache to hold them."""
PART, PART_WARPS = 1024, 4
"""Inputs of a program where groups of a token are on their own."""


@triton.jit
def _read(p_x, m_i, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """Inputs in float32, of gates and ups what the activation makes of them, rounded."""
    b_x = tl.load(p_x, mask=m_i, other=0.0)
    if ACTIVATION != "":
        b_up = tl.load(p_x + WIDTH, mask=m_i, other=0.0).to(tl.float32)
        b_x = (activate(b_x.to(tl.float32), ACTIVATION) * b_up).to(b_x.dtype)
    return b_x.to(tl.float32)


@triton.jit
def _size(b_x, INTEGERS: tl.constexpr):
    """Magnitudes; of what becomes an integer a NaN counts as inf, so that the scale becomes NaN."""
    b_size = tl.abs(b_x)
    if INTEGERS:
        b_size = tl.where(b_size == b_size, b_size, float("inf"))
    return b_size


@triton.jit
def _scale(b_top, fixed, LARGEST: tl.constexpr, INTEGERS: tl.constexpr):
    """Of the largest magnitudes, and what values are multiplied with; `fixed`: see below."""
    if fixed is not None:
        b_scale = tl.zeros_like(b_top) + tl.load(fixed)
        b_inverse = b_scale
    else:
        b_inverse = tl.where(b_top > 1e-30, tl.div_rn(LARGEST, tl.maximum(b_top, 1e-30)), 0.0)
        b_scale = tl.div_rn(b_top, LARGEST)
    if INTEGERS:
        b_scale = tl.where(b_top < float("inf"), b_scale, float("nan"))
    return b_scale, b_inverse


@triton.jit
def _numbers(b_x, b_inverse, fixed, zero, LARGEST: tl.constexpr, INTEGERS: tl.constexpr):
    LEAST: tl.constexpr = -128.0 if INTEGERS and fixed is not None else -LARGEST
    if fixed is not None:
        b_values = tl.div_rn(b_x, b_inverse)
        if zero is not None:
            b_values += tl.load(zero)
    else:
        b_values = b_x * b_inverse
    b_values = tl.minimum(tl.maximum(b_values, LEAST), LARGEST)
    if INTEGERS:
        b_values = tl.where(b_values == b_values, b_values, 0.0)
        b_values = (b_values + 12582912.0) - 12582912.0  # the nearest integer, ties to even
    else:
        b_values = tl.where(b_x == b_x, b_values, b_x)  # a NaN stays one
    return b_values


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
    """Grid: tokens, parts of BLOCK inputs. `values` [T, WIDTH], `scales` [T, ceil(WIDTH / GROUP)],
    both dense. ACTIVATION: x are WIDTH gates, then as many ups. `fixed` float32 [1]: the scale of
    all tokens, None: each has its own; `zero` the same: what is added to their integers."""
    i_row = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = BLOCK // GROUP
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    o_group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    o_i = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_i = o_i < WIDTH
    if NORM:
        b_weight = tl.load(norm_weight + o_i, mask=m_i, other=0.0)
    enter(DEPENDENT)
    b_x = _read(x + i_row * x_stride + o_i, m_i, WIDTH, ACTIVATION)
    if NORM:
        squares = tl.sum(tl.sum(b_x * b_x, axis=1), axis=0)
        b_x = b_x * tl.rsqrt(squares / WIDTH + eps) * b_weight
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    b_top = tl.max(_size(b_x, INTEGERS), axis=1)
    b_scale, b_inverse = _scale(b_top, fixed, LARGEST, INTEGERS)
    b_inverse = tl.zeros_like(b_x) + b_inverse[:, None]
    b_values = _numbers(b_x, b_inverse, fixed, zero, LARGEST, INTEGERS)
    tl.store(values + i_row * WIDTH + o_i, b_values.to(values.dtype.element_ty), mask=m_i)
    tl.store(scales + i_row * GROUPS + o_group, b_scale, mask=o_group < GROUPS)


@triton.jit
def wide_rows_kernel(
    x,
    values,
    scales,
    fixed,
    zero,
    x_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: tokens. The same with one scale a token, CHUNK inputs at a time."""
    i_row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, CHUNK)
    enter(DEPENDENT)
    p_x = x + i_row * x_stride
    b_most = tl.zeros([CHUNK], tl.float32)
    for k in range(0, WIDTH, CHUNK):
        b_x = _read(p_x + k + o_i, k + o_i < WIDTH, WIDTH, ACTIVATION)
        b_most = tl.maximum(b_most, _size(b_x, INTEGERS))
    b_top = tl.max(b_most, axis=0) + tl.zeros([1], tl.float32)
    b_scale, b_inverse = _scale(b_top, fixed, LARGEST, INTEGERS)
    b_inverse = tl.zeros([CHUNK], tl.float32) + b_inverse
    for k in range(0, WIDTH, CHUNK):
        m_i = k + o_i < WIDTH
        b_x = _read(p_x + k + o_i, m_i, WIDTH, ACTIVATION)
        b_values = _numbers(b_x, b_inverse, fixed, zero, LARGEST, INTEGERS)
        p_values = values + i_row * WIDTH + k + o_i
        tl.store(p_values, b_values.to(values.dtype.element_ty), mask=m_i)
    tl.store(scales + i_row + tl.arange(0, 1), b_scale)


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
    if group is not None and norm_weight_I is None and block > PART:
        block, warps = max(PART, share), PART_WARPS
    facts = {
        "WIDTH": width, "ACTIVATION": activation or "", "LARGEST": LARGEST[dtype],
        "INTEGERS": dtype is torch.int8,
    }  # fmt: skip

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
        common = {**facts, **launch(x_TI.device)}
        if share > WIDE and norm_weight_I is None and tokens >= MANY:
            wide_rows_kernel[(tokens,)](
                x_TI, values, scales, scale_1, zero_1, x_TI.stride(0), CHUNK=CHUNK,
                num_warps=CHUNK_WARPS, **common,
            )  # fmt: skip
        else:
            scaled_rows_kernel[tokens, triton.cdiv(width, block)](
                x_TI, norm_weight_I, values, scales, scale_1, zero_1, x_TI.stride(0), eps,
                BLOCK=block, GROUP=share, NORM=norm_weight_I is not None, num_warps=warps, **common,
            )  # fmt: skip
        return ScaledRows(values.to(dtype), scales)

    return quantize
