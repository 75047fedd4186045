"""Linear with block-quantized weights by the native kernels, where many rows of x are multiplied as they are.

Few rows take the kernel of native.py. Many pay the widening of the weights once and leave out what costs it most: as
codes, the sums of every 16 or 32 inputs leave the matrix tiles (native_linear_blocks_widened.cpp).
T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.kernels.gated_act.native import ACTIVATIONS
from headrace.back.kernels.linear_blocks import native
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_blocks.op import Linear, LinearBlocksProblem, is_plain
from headrace.back.kernels.linear_quant.rows import CodedRows
from headrace.back.kernels.native.library import INT32, INT64, POINTER, NativeLibrary
from headrace.back.kernels.native.wrap import DTYPES, loaded
from headrace.back.kernels.op import Kernel

NAME = "linear_blocks_widened"
_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 5, *(INT32,) * 2)


def bind_with(
    library: NativeLibrary,
    problem: LinearBlocksProblem,
    weight: BlockWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The kernels of one library; keeps the weight and the bias."""
    assert problem.plain_from is not None, problem
    few = native.bind_with(library, replace(problem, plain_from=None), weight, bias_O)
    many = library.bind(NAME, *_ARGUMENTS)
    inputs, results = problem.inputs, problem.results
    activation = -1 if problem.activation is None else ACTIVATIONS[problem.activation]
    out = torch.float32 if problem.wide else problem.dtype
    table = native.segment_table(weight)
    segments, count = table.ctypes.data, len(table)

    def linear(x: torch.Tensor | CodedRows) -> torch.Tensor:
        if not is_plain(problem, x):
            return few(x)
        assert isinstance(x, torch.Tensor), problem
        rows, width = x.shape
        assert width == inputs and x.dtype == problem.dtype, (x.shape, x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        y_TO = x.new_empty(rows, results, dtype=out)
        many(
            x.data_ptr(), segments, None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(),
            rows, inputs, x.stride(0), results, count, activation, DTYPES[out],
        )  # fmt: skip
        return y_TO

    linear.__dict__["kept"] = (weight, table)  # the kernels hold their addresses
    return linear


def _supports(problem: LinearBlocksProblem) -> str | None:
    if problem.plain_from is None:
        return "multiplies many rows as they are"
    if problem.dtype != torch.bfloat16:
        return f"multiplies rows of {torch.bfloat16}, not of {problem.dtype}"
    if (reason := native.unserved(problem)) is not None:
        return reason
    return None if loaded().has(NAME) else "needs matrix tiles (AMX)"


KERNEL = Kernel(
    name="native_widened",
    supports=_supports,
    bind=lambda problem, weight, bias_O: bind_with(loaded(), problem, weight, bias_O),
)
