"""Root mean square norm to int8 rows by the native kernel (rms_norm/native_rms_norm.cpp)."""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_quant.rows import (
    TILE,
    FixedScale,
    QuantizedRows,
    padded_inputs,
)
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
from headrace.back.kernels.rms_norm_quant.op import QuantizedNorm, RMSNormQuantProblem

_ARGUMENTS = (*(POINTER,) * 6, *(INT64,) * 6, FLOAT, FLOAT, FLOAT, INT32)
_GROUP = 32


def bind_with(
    library: NativeLibrary,
    problem: RMSNormQuantProblem,
    weight_E: torch.Tensor,
    fixed: FixedScale | None = None,
) -> QuantizedNorm:
    """The kernel of one library."""
    assert (fixed is not None) == problem.fixed, problem
    scale, zero = (0.0, 0.0) if fixed is None else (fixed.scale, float(fixed.zero))
    kernel = library.bind("rms_norm_quantized", *_ARGUMENTS)
    assert weight_E.dtype == torch.float32 and weight_E.shape == (problem.width,), weight_E.shape
    weight_E = weight_E.contiguous()
    group, width, eps, code = problem.group, problem.width, problem.eps, DTYPES[problem.dtype]
    padded = padded_inputs(width, group)
    # Rows a power of two apart would share the sets of the first-level cache: one line more.
    stride = -(-padded // TILE) * TILE + TILE
    groups, halves = (1, 1) if group is None else (padded // group, 2)

    def quantized_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor | None) -> QuantizedRows:
        rows = x_TE.shape[0]
        assert x_TE.shape == (rows, width) and x_TE.dtype == problem.dtype, (x_TE.shape, x_TE.dtype)
        assert x_TE.stride(1) == 1, x_TE.stride()
        if residual_TE is not None:
            assert residual_TE.shape == x_TE.shape and residual_TE.dtype == x_TE.dtype
            assert residual_TE.stride(1) == 1, residual_TE.stride()
        quantized = x_TE.new_empty(rows, stride, dtype=torch.int8)
        scales = x_TE.new_empty(rows, groups, dtype=torch.float32)
        sums = x_TE.new_empty(rows, groups, halves, dtype=torch.int32)
        kernel(
            x_TE.data_ptr(), None if residual_TE is None else residual_TE.data_ptr(), weight_E.data_ptr(),
            quantized.data_ptr(), scales.data_ptr(), sums.data_ptr(), rows, width, x_TE.stride(0),
            0 if residual_TE is None else residual_TE.stride(0), stride, group or 0, eps, scale, zero, code,
        )  # fmt: skip
        return QuantizedRows(quantized[:, :padded], scales, sums)

    return quantized_norm


def _supports(problem: RMSNormQuantProblem) -> str | None:
    if problem.group is not None and (problem.group < _GROUP or problem.group % _GROUP):
        return f"makes groups of multiples of {_GROUP} inputs, not of {problem.group}"
    if problem.group is not None and problem.fixed:
        return "knows a scale of all rows without groups"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, weight_E, fixed: bind_with(loaded(), problem, weight_E, fixed),
    invariant=True,
)
