"""The state of rows behind verified drafts by the native kernel: whole rows are copied."""

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
from headrace.back.kernels.state_return.op import StateReturn, StateReturnProblem

_ARGUMENTS = (*(POINTER,) * 5, *(INT64,) * 5, INT32)


def bind_with(library: NativeLibrary, problem: StateReturnProblem) -> StateReturn:
    """The kernel of one library."""
    kernel = library.bind("state_return", *_ARGUMENTS)
    states, depth = problem.trail.first - 1, problem.trail.depth

    def state_return(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        length_M: torch.Tensor,
        state_XZ: torch.Tensor,
    ) -> None:
        numbers = query_start_R1, kv_len_R, length_M
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in numbers)
        assert row_R.dtype in (torch.int32, torch.int64) and row_R.is_contiguous(), row_R.dtype
        assert state_XZ.dtype == torch.uint8 and state_XZ.stride(1) == 1, state_XZ.stride()
        kernel(
            row_R.data_ptr(), *(one.data_ptr() for one in numbers), state_XZ.data_ptr(),
            row_R.shape[0], states, depth, state_XZ.shape[1], state_XZ.stride(0),
            row_R.dtype == torch.int64,
        )  # fmt: skip

    return state_return


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)
