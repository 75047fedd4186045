"""The native kernel: row by row, in place."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import (
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.position_shift.op import PositionShift, PositionShiftProblem


def bind_with(library: NativeLibrary, problem: PositionShiftProblem, *, sign: int) -> PositionShift:
    """The kernel of one library."""
    kernel = library.bind("position_shift", *(POINTER,) * 4, *(INT64,) * 3, INT32, INT32)

    def shift(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        delta_M: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> None:
        assert row_R.dtype in (torch.int32, torch.int64) and row_R.is_contiguous(), row_R.dtype
        assert query_start_R1.dtype == torch.int32 and query_start_R1.is_contiguous()
        assert delta_M.dtype == positions_T.dtype == torch.int64, positions_T.dtype
        assert delta_M.is_contiguous() and positions_T.is_contiguous()
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), delta_M.data_ptr(),
            positions_T.data_ptr(), row_R.shape[0], delta_M.shape[0], positions_T.shape[0],
            row_R.dtype == torch.int64, sign,
        )  # fmt: skip

    return shift


def _kernel(*, sign: int) -> Kernel[PositionShiftProblem]:
    return Kernel(
        name="native",
        supports=lambda problem: unsupported(problem.device, torch.float32),
        bind=lambda problem: bind_with(loaded(), problem, sign=sign),
        invariant=True,
    )


ADD_KERNEL, SUBTRACT_KERNEL = _kernel(sign=1), _kernel(sign=-1)
