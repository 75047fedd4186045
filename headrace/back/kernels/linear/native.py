"""Linear by the native kernel, reading the plain weight in place; and op fused_linear where it
gates its own results, act(gate) * up in float32. Of that op the norm before and the addition behind
stay ops of their own on a CPU: they touch a thousandth of the bytes.

A result depends on its own row alone: not on the rows beside it, their number or the number of
threads. So a request's tokens do not depend on who else is being served. T tokens, I inputs, O
outputs; x and the weight share a dtype; sums are float32.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.fused_linear.op import FusedLinear, FusedLinearProblem
from headrace.back.kernels.gated_act.native import ACTIVATIONS
from headrace.back.kernels.linear.op import Linear, LinearProblem
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

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 6, INT32, INT32)

GATED_UNIT = 16
"""Outputs of a tile: gates and what they gate are so many side by side."""


def bind_with(
    library: NativeLibrary,
    problem: LinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The kernel of one library; keeps the weight, which must have contiguous rows."""
    assert weight_OI.dtype == problem.dtype and weight_OI.stride(1) == 1, weight_OI.stride()
    assert bias_O is None or (bias_O.dtype == problem.dtype and bias_O.is_contiguous())
    kernel = library.bind("linear", *_ARGUMENTS)
    outputs, inputs = weight_OI.shape
    weight_stride = weight_OI.stride(0)
    code, out = DTYPES[problem.dtype], torch.float32 if problem.wide else problem.dtype
    out_code = DTYPES[out]

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        rows = x_TI.shape[0]
        facts = x_TI.shape, x_TI.dtype
        assert facts == ((rows, inputs), problem.dtype), facts
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(rows, outputs, dtype=out)
        # Addresses are asked for at each call: the closure is what keeps the tensors alive.
        kernel(
            x_TI.data_ptr(), weight_OI.data_ptr(), None if bias_O is None else bias_O.data_ptr(),
            y_TO.data_ptr(), rows, outputs, inputs, x_TI.stride(0), weight_stride, outputs, code, out_code,
        )  # fmt: skip
        return y_TO

    return linear


def bind_gated(
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


def _gates(problem: FusedLinearProblem) -> str | None:
    if problem.eps is not None or problem.add or problem.bias:
        return "neither norms nor adds nor has a bias"
    if problem.activation not in ACTIVATIONS:
        return f"gates by {', '.join(ACTIVATIONS)}"
    if problem.results % GATED_UNIT:
        return f"gates multiples of {GATED_UNIT} outputs, not {problem.results}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_OI, bias_O: bind_with(loaded(), problem, weight_OI, bias_O),
    invariant=True,
)
GATED_KERNEL = Kernel(
    name="native",
    supports=_gates,
    bind=lambda problem, weight_OI, bias_O, norm_weight_I: bind_gated(loaded(), problem, weight_OI),
    invariant=True,
)
