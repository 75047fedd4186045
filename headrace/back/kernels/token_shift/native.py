"""Tokens moved towards those before them, by the native kernel."""

from __future__ import annotations

import torch

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
from headrace.back.kernels.token_shift.op import TokenShift, TokenShiftProblem, check_weights


def bind_with(
    library: NativeLibrary, problem: TokenShiftProblem, weight_NE: torch.Tensor
) -> TokenShift:
    """The kernel of one library."""
    check_weights(problem, weight_NE)
    kernel = library.bind("token_shift", *(POINTER,) * 4, *ROW_TYPES, *(INT64,) * 5, INT32, INT32)
    weight_NE, code = weight_NE.contiguous(), DTYPES[problem.dtype]

    def token_shift(x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        assert x_TE.dtype == state_ME.dtype == problem.dtype, (x_TE.dtype, state_ME.dtype)
        assert x_TE.stride(1) == state_ME.stride(1) == 1, (x_TE.stride(), state_ME.stride())
        y_NTE = x_TE.new_empty((problem.count, *x_TE.shape))
        at, wide = row_arguments(rows, state_ME)
        kernel(
            x_TE.data_ptr(), weight_NE.data_ptr(), y_NTE.data_ptr(), state_ME.data_ptr(), *at,
            x_TE.shape[0], problem.width, problem.count, x_TE.stride(0), state_ME.stride(0), wide,
            code,
        )  # fmt: skip
        return y_NTE.transpose(0, 1)

    return token_shift


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_NE: bind_with(loaded(), problem, weight_NE),
    invariant=True,
)
