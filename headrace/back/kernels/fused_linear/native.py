"""A GEMM that gates its own results, by the native kernel (linear/native_linear.cpp): act(gate) *
up in float32.

The norm before and the addition behind stay ops of their own on a CPU: they touch a thousandth of
the bytes.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.fused_linear.op import FusedLinear, FusedLinearProblem
from headrace.back.kernels.gated_act.native import ACTIVATIONS
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

UNIT = 16
"""Outputs of a tile: gates and what they gate are so many side by side."""


def bind_with(
    library: NativeLibrary, problem: FusedLinearProblem, weight_OI: torch.Tensor
) -> FusedLinear:
    """The kernel of one library; keeps the weight, which must have contiguous rows."""
    assert weight_OI.dtype == problem.dtype and weight_OI.stride(1) == 1, weight_OI.stride()
    assert problem.activation is not None
    kernel = library.bind("linear_gated", *(POINTER,) * 3, *(INT64,) * 6, INT32, INT32)
    inputs, outputs, results = problem.inputs, problem.outputs, problem.results
    activation, code = ACTIVATIONS[problem.activation], DTYPES[problem.dtype]

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        rows = x_TI.shape[0]
        assert x_TI.shape == (rows, inputs) and x_TI.dtype == problem.dtype, x_TI.shape
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TY = x_TI.new_empty(rows, results)
        kernel(
            x_TI.data_ptr(), weight_OI.data_ptr(), y_TY.data_ptr(), rows, outputs, inputs, x_TI.stride(0),
            weight_OI.stride(0), results, activation, code,
        )  # fmt: skip
        return y_TY

    return fused_linear


def _supports(problem: FusedLinearProblem) -> str | None:
    if problem.eps is not None or problem.add or problem.bias:
        return "neither norms nor adds nor has a bias"
    if problem.activation not in ACTIVATIONS:
        return f"gates by {', '.join(ACTIVATIONS)}"
    if problem.results % UNIT:
        return f"gates multiples of {UNIT} outputs, not {problem.results}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight_OI, bias_O, norm_weight_I: bind_with(loaded(), problem, weight_OI),
    invariant=True,
)
