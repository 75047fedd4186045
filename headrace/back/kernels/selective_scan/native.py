"""Mamba's selective scan by the native kernel."""

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
from headrace.back.kernels.selective_scan.op import (
    SelectiveScan,
    SelectiveScanProblem,
    check_weights,
)

_ARGUMENTS = (*(POINTER,) * 10, *ROW_TYPES, *(INT64,) * 8, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: SelectiveScanProblem,
    decay_IN: torch.Tensor,
    bias_I: torch.Tensor,
    skip_I: torch.Tensor,
) -> SelectiveScan:
    """The kernel of one library."""
    check_weights(problem, decay_IN, bias_I, skip_I)
    kernel = library.bind("selective_scan", *_ARGUMENTS)
    weights = [weight.contiguous() for weight in (decay_IN, bias_I, skip_I)]
    sizes, code = (problem.channels, problem.state_dim), DTYPES[problem.dtype]

    def selective_scan(
        x_TI: torch.Tensor,
        dt_TI: torch.Tensor,
        b_TN: torch.Tensor,
        c_TN: torch.Tensor,
        gate_TI: torch.Tensor,
        state_MIN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = x_TI, dt_TI, b_TN, c_TN, gate_TI
        assert all(one.dtype == problem.dtype and one.stride(1) == 1 for one in inputs)
        assert state_MIN.dtype == torch.float32 and state_MIN[0].is_contiguous()
        y_TI = x_TI.new_empty(x_TI.shape)
        at, wide = row_arguments(rows, state_MIN)
        kernel(
            *(one.data_ptr() for one in inputs), *(weight.data_ptr() for weight in weights),
            y_TI.data_ptr(), state_MIN.data_ptr(), *at, *sizes,
            *(one.stride(0) for one in inputs), state_MIN.stride(0), wide, code,
        )  # fmt: skip
        return y_TI

    return selective_scan


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
