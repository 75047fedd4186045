"""Linear by the native kernel, reading the plain weight in place.

A result depends on its own row alone: not on the rows beside it, their number or the number of
threads. So a request's tokens do not depend on who else is being served. T tokens, I inputs, O
outputs; x and the weight share a dtype; sums are float32.
"""

from __future__ import annotations

import torch

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


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_OI, bias_O: bind_with(loaded(), problem, weight_OI, bias_O),
    invariant=True,
)
