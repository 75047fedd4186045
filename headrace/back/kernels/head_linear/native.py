"""The GEMM of each head by the native kernel; a row's bits do not depend on the others."""

from __future__ import annotations

import torch

from headrace.back.kernels.head_linear.op import HeadLinear, HeadLinearProblem, check_operands
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

MAX_INPUTS = 1024
_ARGUMENTS = (*(POINTER,) * 3, *(INT64,) * 8, INT32)


def bind_with(
    library: NativeLibrary, problem: HeadLinearProblem, weight_HOI: torch.Tensor
) -> HeadLinear:
    """The kernel of one library; keeps the weight."""
    kernel = library.bind("head_linear", *_ARGUMENTS)
    weight_HOI, element = weight_HOI.contiguous(), DTYPES[problem.dtype]
    assert weight_HOI.shape == (problem.heads, problem.outputs, problem.inputs), weight_HOI.shape

    def head_linear(x_THI: torch.Tensor, y_THO: torch.Tensor) -> None:
        check_operands(problem, x_THI, y_THO)
        kernel(
            x_THI.data_ptr(), weight_HOI.data_ptr(), y_THO.data_ptr(), x_THI.shape[0],
            problem.heads, problem.inputs, problem.outputs, *x_THI.stride()[:2],
            *y_THO.stride()[:2], element,
        )  # fmt: skip

    return head_linear


def _supports(problem: HeadLinearProblem) -> str | None:
    if problem.inputs > MAX_INPUTS:
        return f"{problem.inputs} inputs are above {MAX_INPUTS}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight: bind_with(loaded(), problem, weight),
    invariant=True,
)
