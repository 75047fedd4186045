"""Layer norm by the native kernel, with or without the residual's addition."""

from __future__ import annotations

import torch

from headrace.back.kernels.layer_norm.op import AddNorm, LayerNormProblem, Norm, check_weights
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*(POINTER,) * 5, *(INT64,) * 7, FLOAT, INT32)


def bind_norm_with(
    library: NativeLibrary,
    problem: LayerNormProblem,
    weight_HE: torch.Tensor,
    bias_E: torch.Tensor | None,
) -> Norm:
    """`layer_norm` of one library."""
    kernel = library.bind("layer_norm", *_ARGUMENTS)
    check_weights(problem, weight_HE, bias_E)
    weight_HE, heads = weight_HE.contiguous(), problem.heads
    width, eps, code = problem.width, problem.eps, DTYPES[problem.dtype]
    bias_E = None if bias_E is None else bias_E.contiguous()

    def norm(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == width and x.dtype == problem.dtype, (x.shape, x.dtype)
        assert heads == 1 or x.shape[-2] == heads, (x.shape, heads)
        y = x.new_empty(x.shape)
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, width)
        inner, outer_stride, inner_stride = 1, x.stride(0) if x.dim() > 1 else 0, 0
        if x.dim() == 3:
            inner, inner_stride = max(x.shape[1], 1), x.stride(1)
        bias = None if bias_E is None else bias_E.data_ptr()
        kernel(
            x.data_ptr(), None, weight_HE.data_ptr(), bias, y.data_ptr(), x.numel() // width, inner,
            heads, width, outer_stride, inner_stride, 0, eps, code,
        )  # fmt: skip
        return y

    return norm


def bind_add_norm_with(
    library: NativeLibrary,
    problem: LayerNormProblem,
    weight_HE: torch.Tensor,
    bias_E: torch.Tensor | None,
) -> AddNorm:
    """`add_layer_norm` of one library."""
    kernel = library.bind("layer_norm", *_ARGUMENTS)
    check_weights(problem, weight_HE, bias_E)
    weight_HE, bias_E = weight_HE.contiguous(), None if bias_E is None else bias_E.contiguous()
    width, eps, code = problem.width, problem.eps, DTYPES[problem.dtype]

    def add_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        assert x_TE.shape == residual_TE.shape and x_TE.dtype == residual_TE.dtype == problem.dtype
        assert x_TE.stride(1) == residual_TE.stride(1) == 1, (x_TE.stride(), residual_TE.stride())
        y_TE = x_TE.new_empty(x_TE.shape)
        bias = None if bias_E is None else bias_E.data_ptr()
        kernel(
            x_TE.data_ptr(), residual_TE.data_ptr(), weight_HE.data_ptr(), bias, y_TE.data_ptr(),
            x_TE.shape[0], 1, 1, width, x_TE.stride(0), 0, residual_TE.stride(0), eps, code,
        )  # fmt: skip
        return y_TE

    return add_norm


def _supports(problem: LayerNormProblem) -> str | None:
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_norm_with(loaded(), problem, *weights),
    invariant=True,
)
ADD_KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_add_norm_with(loaded(), problem, *weights),
    invariant=True,
)
