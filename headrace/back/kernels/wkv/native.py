"""RWKV 4's weighted average by the native kernel."""

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
from headrace.back.kernels.wkv.op import Wkv, WkvProblem, check_weights


def bind_with(
    library: NativeLibrary, problem: WkvProblem, decay_C: torch.Tensor, first_C: torch.Tensor
) -> Wkv:
    """The kernel of one library."""
    check_weights(problem, decay_C, first_C)
    kernel = library.bind("wkv", *(POINTER,) * 6, *ROW_TYPES, *(INT64,) * 4, INT32, INT32)
    weights, code = (decay_C.contiguous(), first_C.contiguous()), DTYPES[problem.dtype]

    def wkv(
        k_TC: torch.Tensor, v_TC: torch.Tensor, state_M3C: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        assert all(one.dtype == problem.dtype and one.stride(1) == 1 for one in (k_TC, v_TC))
        assert state_M3C.dtype == torch.float32 and state_M3C[0].is_contiguous()
        y_TC = k_TC.new_empty(k_TC.shape)
        at, wide = row_arguments(rows, state_M3C)
        kernel(
            k_TC.data_ptr(), v_TC.data_ptr(), *(weight.data_ptr() for weight in weights),
            y_TC.data_ptr(), state_M3C.data_ptr(), *at, problem.channels, k_TC.stride(0),
            v_TC.stride(0), state_M3C.stride(0), wide, code,
        )  # fmt: skip
        return y_TC

    return wkv


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
