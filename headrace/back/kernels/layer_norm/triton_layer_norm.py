"""Layer norm in Triton, with or without the residual's addition: one program per row.

The row is read once and stays in registers, so that the variance is that of the centred values.
Shapes: rows of E = WIDTH values, H = HEADS weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.layer_norm.op import AddNorm, LayerNormProblem, Norm, check_weights
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.rows import norm_block, row_strides
from headrace.back.kernels.triton.wrap import launch, unsupported

MAX_WIDTH = 1 << 16


@triton.jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Row i lies at x + (i // inner) * outer_stride + (i % inner) * inner_stride; y is dense."""
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < WIDTH
    b_weight = tl.load(weight + i_row % HEADS * WIDTH + o_e, mask=m_e, other=0.0)
    enter(DEPENDENT)
    p_x = x + i_row // inner * outer_stride + i_row % inner * inner_stride + o_e
    b_x = tl.load(p_x, mask=m_e, other=0.0).to(tl.float32)
    if ADD:
        p_residual = residual + i_row * residual_stride + o_e
        b_sum = b_x + tl.load(p_residual, mask=m_e, other=0.0).to(tl.float32)
        b_sum = b_sum.to(residual.dtype.element_ty)
        tl.store(p_residual, b_sum, mask=m_e)
        b_x = b_sum.to(tl.float32)
    b_x = tl.where(m_e, b_x - tl.sum(b_x, axis=0) / WIDTH, 0.0)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps) * b_weight
    if BIAS:
        b_y += tl.load(bias + o_e, mask=m_e, other=0.0)
    tl.store(y + i_row * WIDTH + o_e, b_y.to(y.dtype.element_ty), mask=m_e)


def bind_norm(
    problem: LayerNormProblem, weight_HE: torch.Tensor, bias_E: torch.Tensor | None
) -> Norm:
    """`layer_norm`."""
    check_weights(problem, weight_HE, bias_E)
    width, heads, weight_HE = problem.width, problem.heads, weight_HE.contiguous()
    block, warps = norm_block(width)

    def norm(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        assert heads == 1 or x.shape[-2] == heads, (x.shape, heads)
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, width)
        inner, outer_stride, inner_stride = row_strides(x)
        layer_norm_kernel[(x.numel() // width,)](
            x, x, weight_HE, bias_E, y, inner, outer_stride, inner_stride, 0, problem.eps,
            WIDTH=width, BLOCK=block, HEADS=heads, BIAS=problem.bias, ADD=False, num_warps=warps,
            **launch(x.device),
        )  # fmt: skip
        return y

    return norm


def bind_add_norm(
    problem: LayerNormProblem, weight_HE: torch.Tensor, bias_E: torch.Tensor | None
) -> AddNorm:
    """`add_layer_norm`."""
    check_weights(problem, weight_HE, bias_E)
    width, weight_HE = problem.width, weight_HE.contiguous()
    block, warps = norm_block(width)

    def add_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        assert x_TE.stride(1) == residual_TE.stride(1) == 1, (x_TE.stride(), residual_TE.stride())
        y_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
        layer_norm_kernel[(x_TE.shape[0],)](
            x_TE, residual_TE, weight_HE, bias_E, y_TE, 1, x_TE.stride(0), 0, residual_TE.stride(0),
            problem.eps, WIDTH=width, BLOCK=block, HEADS=1, BIAS=problem.bias, ADD=True,
            num_warps=warps, **launch(x_TE.device),
        )  # fmt: skip
        return y_TE

    return add_norm


def _supports(problem: LayerNormProblem) -> str | None:
    if problem.width > MAX_WIDTH:
        return f"width {problem.width} is above {MAX_WIDTH}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind_norm, invariant=True)
ADD_KERNEL = Kernel(
    name="triton",
    supports=lambda problem: "norms whole rows" if problem.heads > 1 else _supports(problem),
    bind=bind_add_norm,
    invariant=True,
)
