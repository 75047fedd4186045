"""Linear on few rows by the native kernel, reading the plain weight in place; more rows go to torch.

A result does not depend on the rows beside it as long as a batch has at most MAX_ROWS rows, nor on the number of
threads. T tokens, I inputs, O outputs; x and the weight share a dtype; sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear, LinearProblem
from headrace.back.kernels.native.library import INT32, INT64, POINTER, NativeLibrary
from headrace.back.kernels.native.wrap import DTYPES, loaded, unsupported
from headrace.back.kernels.op import Kernel

# Up to so many rows the weights' way from memory counts; above, oneDNN's packed product wins.
MAX_ROWS = {torch.float32: 64, torch.bfloat16: 64}
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
    weight, weight_stride = weight_OI.data_ptr(), weight_OI.stride(0)
    bias = None if bias_O is None else bias_O.data_ptr()
    code, max_rows = DTYPES[problem.dtype], MAX_ROWS[problem.dtype]

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        shape = x_TI.shape
        rows = shape[0]
        if rows > max_rows or len(shape) != 2:
            return F.linear(x_TI, weight_OI, bias_O)
        assert shape[1] == inputs and x_TI.dtype == problem.dtype, (x_TI.shape, x_TI.dtype)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(rows, outputs)
        kernel(
            x_TI.data_ptr(), weight, bias, y_TO.data_ptr(), rows, outputs, inputs,
            x_TI.stride(0), weight_stride, outputs, code, code,
        )  # fmt: skip
        return y_TO

    return linear


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_OI, bias_O: bind_with(loaded(), problem, weight_OI, bias_O),
)
