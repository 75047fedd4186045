"""Mamba 2's recurrence by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_scan.native import ROW_TYPES, row_arguments
from headrace.back.kernels.gated_scan.op import ScanRows
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
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem, check_weights

_ARGUMENTS = (*(POINTER,) * 9, *ROW_TYPES, *(INT64,) * 9, FLOAT, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: SsdScanProblem,
    decay_H: torch.Tensor,
    bias_H: torch.Tensor,
    skip_H: torch.Tensor,
) -> SsdScan:
    """The kernel of one library."""
    check_weights(problem, decay_H, bias_H, skip_H)
    kernel = library.bind("ssd_scan", *_ARGUMENTS)
    weights = [weight_H.contiguous() for weight_H in (decay_H, bias_H, skip_H)]
    sizes = problem.heads, problem.groups, problem.head_dim, problem.state_dim
    low, high = problem.limits
    code = DTYPES[problem.dtype]

    def ssd_scan(
        x_THP: torch.Tensor,
        dt_TH: torch.Tensor,
        b_TGN: torch.Tensor,
        c_TGN: torch.Tensor,
        state_MHPN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = x_THP, dt_TH, b_TGN, c_TGN
        assert all(one.dtype == problem.dtype and one[0].is_contiguous() for one in inputs)
        assert state_MHPN.dtype == torch.float32 and state_MHPN[0].is_contiguous()
        y_THP = x_THP.new_empty(x_THP.shape)
        at, wide = row_arguments(rows, state_MHPN)
        kernel(
            *(one.data_ptr() for one in inputs), *(weight_H.data_ptr() for weight_H in weights),
            y_THP.data_ptr(), state_MHPN.data_ptr(), *at, *sizes,
            *(one.stride(0) for one in inputs), state_MHPN.stride(0), low, high, wide, code,
        )  # fmt: skip
        return y_THP

    return ssd_scan


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
