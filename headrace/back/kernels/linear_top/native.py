"""The greatest results of a GEMM by the native kernels of the GEMMs, which never write the
others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear_blocks import native as linear_blocks
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_quant import native as linear_quant
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.linear_top.op import MAX_COUNT, LinearTop, LinearTopProblem, Weight
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


def bind_with(library: NativeLibrary, problem: LinearTopProblem, weight: Weight) -> LinearTop:
    """The kernel of one library; keeps the weight."""
    gemm, count = problem.gemm, problem.count
    call, kept = _call(library, gemm, weight)

    def top(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x_TI.shape[0]
        assert x_TI.shape == (rows, gemm.inputs) and x_TI.dtype == gemm.dtype, x_TI.shape
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        id_TC = x_TI.new_empty(rows, count, dtype=torch.int64)
        value_TC = x_TI.new_empty(rows, count, dtype=torch.float32)
        call(x_TI, id_TC.data_ptr(), value_TC.data_ptr(), rows, count)
        return id_TC, value_TC

    top.__dict__["kept"] = kept
    return top


def _call(library: NativeLibrary, gemm: Any, weight: Any) -> tuple[Callable[..., None], object]:
    """(x, address of ids, of values, rows, count) -> None, and what has to be kept."""
    inputs, outputs, code = gemm.inputs, gemm.outputs, DTYPES[gemm.dtype]
    if isinstance(weight, BlockWeight):
        kernel = library.bind("linear_blocks_top", *(POINTER,) * 4, *(INT64,) * 5, INT32)
        table = linear_blocks.segment_table(weight)
        at, segments = table.ctypes.data, len(table)
        return lambda x, ids, values, rows, count: kernel(
            x.data_ptr(), at, ids, values, rows, inputs, x.stride(0), segments, count, code
        ), (weight, table)
    if isinstance(weight, PackedWeight):
        is_int8 = weight.form == INT8
        grouped = () if is_int8 else (weight.form.group[1],)
        name = "linear_quant_top" if is_int8 else "linear_fp8_top"
        begin, fixed = (
            ((linear_quant.begin_of(weight),), linear_quant.scale_of(weight))
            if is_int8
            else ((), ())
        )
        kernel = library.bind(
            name, *(POINTER,) * (4 + len(begin)), *(INT64,) * (5 + len(grouped)), *(FLOAT,) * len(fixed), INT32
        )  # fmt: skip
        panels = weight.panels
        return lambda x, ids, values, rows, count: kernel(
            x.data_ptr(), panels.data_ptr(), ids, values, *begin, rows, outputs, inputs, *grouped, x.stride(0), count,
            *fixed, code,
        ), weight  # fmt: skip
    assert weight.dtype == gemm.dtype and weight.stride(1) == 1, weight.stride()
    kernel = library.bind("linear_top", *(POINTER,) * 4, *(INT64,) * 6, INT32)
    return lambda x, ids, values, rows, count: kernel(
        x.data_ptr(), weight.data_ptr(), ids, values, rows, outputs, inputs, x.stride(0), weight.stride(0),
        count, code,
    ), weight  # fmt: skip


def _supports(problem: LinearTopProblem) -> str | None:
    gemm = problem.gemm
    if problem.count > min(MAX_COUNT, gemm.outputs):
        return f"keeps at most {min(MAX_COUNT, gemm.outputs)} results of a row, not {problem.count}"
    if gemm.bias or not gemm.wide:
        return "knows wide GEMMs without a bias"
    if isinstance(gemm, LinearProblem):
        return unsupported(gemm.device, gemm.dtype)
    if gemm.activation is not None or gemm.quantized_rows:
        return "knows neither gates nor quantized rows"
    if isinstance(gemm, LinearQuantProblem):
        return linear_quant.KERNEL.supports(gemm)
    assert isinstance(gemm, LinearBlocksProblem), gemm
    return linear_blocks.KERNEL.supports(gemm)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight: bind_with(loaded(), problem, weight),
    invariant=True,
)
