"""Root mean square norm by the native kernel, with or without the residual's addition."""

from __future__ import annotations

import torch

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
from headrace.back.kernels.rms_norm.op import AddNorm, Norm, RMSNormProblem

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 6, FLOAT, INT32)


def bind_norm_with(library: NativeLibrary, problem: RMSNormProblem, weight_E: torch.Tensor) -> Norm:
    """`rms_norm` of one library."""
    kernel = library.bind("rms_norm", *_ARGUMENTS)
    weight_E = _checked(problem, weight_E)
    width, eps, code = problem.width, problem.eps, DTYPES[problem.dtype]

    def norm(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == width and x.dtype == problem.dtype, (x.shape, x.dtype)
        y = x.new_empty(x.shape)
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, width)
        inner, outer_stride, inner_stride = _rows(x)
        kernel(
            x.data_ptr(), None, weight_E.data_ptr(), y.data_ptr(), x.numel() // width, inner, width,
            outer_stride, inner_stride, 0, eps, code,
        )  # fmt: skip
        return y

    return norm


def bind_add_norm_with(
    library: NativeLibrary, problem: RMSNormProblem, weight_E: torch.Tensor
) -> AddNorm:
    """`add_rms_norm` of one library."""
    kernel = library.bind("rms_norm", *_ARGUMENTS)
    weight_E = _checked(problem, weight_E)
    width, eps, code = problem.width, problem.eps, DTYPES[problem.dtype]

    def add_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        assert x_TE.shape == residual_TE.shape and x_TE.dtype == residual_TE.dtype == problem.dtype
        assert x_TE.stride(1) == residual_TE.stride(1) == 1, (x_TE.stride(), residual_TE.stride())
        y_TE = x_TE.new_empty(x_TE.shape)
        kernel(
            x_TE.data_ptr(), residual_TE.data_ptr(), weight_E.data_ptr(), y_TE.data_ptr(),
            x_TE.shape[0], 1, width, x_TE.stride(0), 0, residual_TE.stride(0), eps, code,
        )  # fmt: skip
        return y_TE

    return add_norm


def _checked(problem: RMSNormProblem, weight_E: torch.Tensor) -> torch.Tensor:
    assert weight_E.dtype == torch.float32 and weight_E.shape == (problem.width,), weight_E.shape
    return weight_E.contiguous()


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    """(rows of the inner dimension, stride of the outer, stride of the inner) of 1 to 3
    dimensions."""
    if x.dim() == 3:
        return max(x.shape[1], 1), x.stride(0), x.stride(1)
    return 1, x.stride(0) if x.dim() == 2 else 0, 0


def _supports(problem: RMSNormProblem) -> str | None:
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight_E: bind_norm_with(loaded(), problem, weight_E),
    invariant=True,
)
ADD_KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight_E: bind_add_norm_with(loaded(), problem, weight_E),
    invariant=True,
)
