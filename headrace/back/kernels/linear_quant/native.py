"""Linear with packed int8 or e4m3 weights by the native kernels, for any number of rows.

A result depends neither on the rows beside it nor on the number of threads. T tokens, I inputs, O
outputs.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_act.native import ACTIVATIONS
from headrace.back.kernels.linear_quant.layout import FORMS, PANEL, PackedWeight
from headrace.back.kernels.linear_quant.op import Linear, LinearQuantProblem
from headrace.back.kernels.linear_quant.rows import QuantizedRows, checked, padded_inputs
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
from headrace.back.parallel.bundle import INT8

MAX_INPUTS = 65536
"""More could overflow the 32-bit sums of 255 * 127."""
_ARGUMENTS = (*(POINTER,) * 5, *(INT64,) * 5, INT32, FLOAT, FLOAT, INT32, INT32)
_FP8_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 6, *(INT32,) * 3)
_QUANTIZED_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 5, *(INT32,) * 3)


def bind_with(
    library: NativeLibrary,
    problem: LinearQuantProblem,
    weight: PackedWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The kernel of one library; keeps the weight and the bias."""
    assert (weight.outputs, weight.inputs) == (problem.outputs, problem.inputs), problem
    assert weight.panels.is_contiguous() and weight.form == problem.form, weight.form
    assert (weight.fixed is not None) == problem.fixed, weight.fixed
    assert bias_O is None or (bias_O.dtype == problem.dtype and bias_O.is_contiguous())
    if problem.quantized_rows:
        return _bind_quantized_rows(library, problem, weight, bias_O)
    grouped = () if problem.form == INT8 else (problem.form.group[1],)
    kernel = (
        library.bind("linear_fp8", *_FP8_ARGUMENTS)
        if grouped
        else library.bind("linear_quant", *_ARGUMENTS)
    )
    inputs, outputs, code = problem.inputs, problem.outputs, DTYPES[problem.dtype]
    activation = -1 if problem.activation is None else ACTIVATIONS[problem.activation]
    panels, out = weight.panels, torch.float32 if problem.wide else problem.dtype
    begin = () if grouped else (begin_of(weight),)
    fixed = () if grouped else scale_of(weight)

    def linear(x_TI: torch.Tensor | QuantizedRows) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor), problem
        rows, width = x_TI.shape
        assert width == inputs and x_TI.dtype == problem.dtype, (x_TI.shape, x_TI.dtype)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(rows, problem.results, dtype=out)
        kernel(
            x_TI.data_ptr(), panels.data_ptr(), None if bias_O is None else bias_O.data_ptr(),
            y_TO.data_ptr(), *begin, rows, outputs, inputs, *grouped, x_TI.stride(0), problem.results, activation,
            *fixed, code, DTYPES[out],
        )  # fmt: skip
        return y_TO

    linear.__dict__["kept"] = weight.begin_P  # the kernel has its address alone
    return linear


def begin_of(weight: PackedWeight) -> int | None:
    """The address of what sums begin with; None: they begin with 0."""
    return None if weight.begin_P is None else weight.begin_P.data_ptr()


def scale_of(weight: PackedWeight) -> tuple[float, float]:
    """The scale and zero point of all rows; a scale of 0: each has its own."""
    return (0.0, 0.0) if weight.fixed is None else (weight.fixed.scale, float(weight.fixed.zero))


def _bind_quantized_rows(
    library: NativeLibrary,
    problem: LinearQuantProblem,
    weight: PackedWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    kernel = library.bind("linear_quant_int8_rows", *_QUANTIZED_ARGUMENTS)
    inputs, outputs = problem.inputs, problem.outputs
    activation = -1 if problem.activation is None else ACTIVATIONS[problem.activation]
    panels, out = weight.panels, torch.float32 if problem.wide else problem.dtype
    padded, full = padded_inputs(inputs, None), int(weight.fixed is not None)

    def linear(x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        quantized, scales, sums = checked(x, padded=padded)
        y_TO = scales.new_empty(len(quantized), problem.results, dtype=out)
        kernel(
            quantized.data_ptr(), scales.data_ptr(), sums.data_ptr(), panels.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), begin_of(weight), len(quantized),
            outputs, inputs, quantized.stride(0), problem.results, activation, full, DTYPES[out],
        )  # fmt: skip
        return y_TO

    return linear


def _supports(problem: LinearQuantProblem) -> str | None:
    if problem.wide and problem.bias:
        return "adds no bias to wide results"
    if problem.activation is not None:
        if problem.bias or problem.activation not in ACTIVATIONS:
            return f"gates by {', '.join(ACTIVATIONS)}, without a bias"
        if problem.results % PANEL:
            return f"gates whole panels of {PANEL} outputs"
    if problem.form != INT8 and (problem.quantized_rows or problem.fixed):
        return f"multiplies {problem.form} weights by plain rows"
    if problem.inputs > MAX_INPUTS and problem.form == INT8:
        return f"sums at most {MAX_INPUTS} inputs, not {problem.inputs}"
    if problem.form not in FORMS:
        return f"reads {', '.join(map(str, FORMS))}, not {problem.form}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight, bias_O: bind_with(loaded(), problem, weight, bias_O),
    invariant=True,
)
