"""Linear with block-quantized weights by the native kernel, and the packing of a checkpoint's
blocks into its panels.

A result depends neither on the rows beside it nor on the number of threads. T tokens, I inputs, O
outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from headrace.back.kernels.gated_act.native import ACTIVATIONS
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, PANEL, BlockWeight, Segment
from headrace.back.kernels.linear_blocks.op import Linear, LinearBlocksProblem
from headrace.back.kernels.linear_quant.rows import QuantizedRows, checked, padded_inputs
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

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 5, *(INT32,) * 3)
_QUANTIZED_ARGUMENTS = (*(POINTER,) * 6, *(INT64,) * 5, *(INT32,) * 2)
_PACK_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 7)
MAX_SEGMENTS = 8


def bind_with(
    library: NativeLibrary,
    problem: LinearBlocksProblem,
    weight: BlockWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The kernel of one library; keeps the weight and the bias."""
    assert (weight.inputs, weight.kinds) == (problem.inputs, problem.kinds), problem
    assert all(segment.panels.is_contiguous() for segment in weight.segments)
    assert bias_O is None or (bias_O.dtype == problem.dtype and bias_O.is_contiguous())
    if problem.quantized_rows:
        return _bind_quantized_rows(library, problem, weight, bias_O)
    kernel = library.bind("linear_blocks", *_ARGUMENTS)
    return bind_rows(kernel, problem, weight, bias_O, DTYPES[problem.dtype])


def bind_rows(
    kernel: Callable[..., None],
    problem: LinearBlocksProblem,
    weight: BlockWeight,
    bias_O: torch.Tensor | None,
    *types: int,
) -> Linear:
    """A kernel over plain rows; keeps weight and bias. `types`: what it is told before the type of
    its results."""
    inputs, results = problem.inputs, problem.results
    activation = -1 if problem.activation is None else ACTIVATIONS[problem.activation]
    out = torch.float32 if problem.wide else problem.dtype
    table = segment_table(weight)
    segments, count = table.ctypes.data, len(table)
    types = (*types, DTYPES[out])

    def linear(x_TI: torch.Tensor | QuantizedRows) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor), problem
        rows, width = x_TI.shape
        assert width == inputs and x_TI.dtype == problem.dtype, (x_TI.shape, x_TI.dtype)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(rows, results, dtype=out)
        kernel(
            x_TI.data_ptr(), segments, None if bias_O is None else bias_O.data_ptr(),
            y_TO.data_ptr(), rows, inputs, x_TI.stride(0), results, count, activation, *types,
        )  # fmt: skip
        return y_TO

    linear.__dict__["kept"] = (weight, table)  # the kernel holds their addresses
    return linear


def segment_table(weight: BlockWeight) -> np.ndarray:
    """The weight's segments as the kernels read them; whoever keeps its address keeps it, and the
    weight."""
    assert all(segment.panels.is_contiguous() for segment in weight.segments)
    rows = [(s.panels.data_ptr(), s.outputs, s.layout.number) for s in weight.segments]
    return np.array(rows, np.int64)


def _bind_quantized_rows(
    library: NativeLibrary,
    problem: LinearBlocksProblem,
    weight: BlockWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    kernel = library.bind("linear_blocks_int8_rows", *_QUANTIZED_ARGUMENTS)
    activation = -1 if problem.activation is None else ACTIVATIONS[problem.activation]
    out = torch.float32 if problem.wide else problem.dtype
    table, padded = segment_table(weight), padded_inputs(problem.inputs, weight.x_group)
    segments, count = table.ctypes.data, len(table)

    def linear(x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        quantized, scales, sums = checked(x, padded=padded)
        y_TO = scales.new_empty(len(quantized), problem.results, dtype=out)
        kernel(
            quantized.data_ptr(), scales.data_ptr(), sums.data_ptr(), segments,
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), len(quantized), problem.inputs,
            quantized.stride(0), problem.results, count, activation, DTYPES[out],
        )  # fmt: skip
        return y_TO

    linear.__dict__["kept"] = (weight, table)
    return linear


def pack_rows(
    library: NativeLibrary,
    segment: Segment,
    first: int,
    source: np.ndarray,
    rows: np.ndarray,
) -> int | None:
    """Packs `source[rows]` as outputs first, first + 1, ... of the segment.

    source uint8 [R, bytes] with contiguous rows, whose first bytes are the blocks of the segment's
    inputs; rows int64. Returns the first row with a scale that is NaN or Inf, None if all are
    finite.
    """
    layout = segment.layout
    blocks = segment.panels.shape[1] // layout.block_bytes
    assert source.dtype == np.uint8 and source.strides[1] == 1 and source.ndim == 2
    assert blocks * layout.size <= source.shape[1], (blocks, layout.name, source.shape)
    assert rows.dtype == np.int64 and rows.flags.c_contiguous
    assert first + len(rows) <= segment.outputs, (first, len(rows), segment.outputs)
    pack = library.bind("pack_blocks", *_PACK_ARGUMENTS)
    bad = ctypes.c_int64(-1)
    pack(
        source.ctypes.data, rows.ctypes.data, segment.panels.data_ptr(), ctypes.addressof(bad),
        source.shape[0], source.strides[0], len(rows), first, blocks, layout.size, layout.number,
    )  # fmt: skip
    return None if bad.value < 0 else bad.value


def unserved(problem: LinearBlocksProblem) -> str | None:
    """Why the native kernels do not multiply so, whatever the number of rows."""
    if len(problem.kinds) > MAX_SEGMENTS:
        return f"takes at most {MAX_SEGMENTS} segments, not {len(problem.kinds)}"
    if problem.activation is not None:
        if problem.bias or problem.activation not in ACTIVATIONS:
            return f"gates by {', '.join(ACTIVATIONS)}, without a bias"
        if problem.results % PANEL or any(size % PANEL for _, size in problem.kinds):
            return f"gates whole panels of {PANEL} outputs"
    groups = {LAYOUTS[name].x_group for name, _ in problem.kinds}
    if len(groups) > 1:
        return f"quantizes activations in groups of one size, not {sorted(groups)}"
    return unsupported(problem.device, problem.dtype)


def _supports(problem: LinearBlocksProblem) -> str | None:
    if problem.plain_from is not None:
        return "multiplies quantized values, however many rows there are"
    return unserved(problem)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight, bias_O: bind_with(loaded(), problem, weight, bias_O),
    invariant=True,
)
