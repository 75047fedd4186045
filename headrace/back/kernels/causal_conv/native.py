"""A short causal convolution by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.causal_conv.op import CausalConv, CausalConvProblem, check_weights
from headrace.back.kernels.gated_scan.native import ROW_TYPES, row_arguments
from headrace.back.kernels.gated_scan.op import ScanRows
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

MAX_TAPS = 8
_ARGUMENTS = (*(POINTER,) * 5, *ROW_TYPES, *(INT64,) * 4, *(INT32,) * 3)


def bind_with(
    library: NativeLibrary,
    problem: CausalConvProblem,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
) -> CausalConv:
    """The kernel of one library."""
    check_weights(problem, weight_WC, bias_C)
    kernel = library.bind("causal_conv", *_ARGUMENTS)
    weight_WC = weight_WC.contiguous()
    bias_C = None if bias_C is None else bias_C.contiguous()
    taps, channels = weight_WC.shape
    silu, code = int(problem.activation == "silu"), DTYPES[problem.dtype]

    def causal_conv(x_TC: torch.Tensor, state_MWC: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        assert x_TC.dtype == state_MWC.dtype == problem.dtype and x_TC.stride(1) == 1, x_TC.dtype
        assert state_MWC.shape[1:] == (taps - 1, channels) and state_MWC[0].is_contiguous()
        y_TC = x_TC.new_empty(x_TC.shape)
        bias = None if bias_C is None else bias_C.data_ptr()
        at, wide = row_arguments(rows, state_MWC)
        kernel(
            x_TC.data_ptr(), weight_WC.data_ptr(), bias, y_TC.data_ptr(), state_MWC.data_ptr(), *at,
            channels, taps, x_TC.stride(0), state_MWC.stride(0), silu, wide, code,
        )  # fmt: skip
        return y_TC

    return causal_conv


def _supports(problem: CausalConvProblem) -> str | None:
    if not 2 <= problem.taps <= MAX_TAPS:
        return f"has 2 to {MAX_TAPS} taps, not {problem.taps}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
