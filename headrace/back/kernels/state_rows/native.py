"""The state of a step's rows by the native kernel: whole rows are copied or zeroed, others not
touched."""

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
from headrace.back.kernels.state_rows.op import StateRows, StateRowsProblem

_ARGUMENTS = (*(POINTER,) * 6, *(INT64,) * 7, INT32, INT32)


def bind_with(library: NativeLibrary, problem: StateRowsProblem, *, keeps: bool) -> StateRows:
    """The kernel of one library: `state_keep`, or else `state_begin`."""
    kernel = library.bind("state_rows", *_ARGUMENTS)

    def state_rows(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        table_RB: torch.Tensor,
        state_MZ: torch.Tensor,
        snapshots_SZ: torch.Tensor,
    ) -> None:
        numbers = query_start_R1, kv_len_R, table_RB
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in numbers)
        assert row_R.dtype in (torch.int32, torch.int64) and row_R.is_contiguous(), row_R.dtype
        assert state_MZ.dtype == snapshots_SZ.dtype == torch.uint8, state_MZ.dtype
        assert state_MZ.stride(1) == snapshots_SZ.stride(1) == 1, state_MZ.stride()
        kernel(
            row_R.data_ptr(), *(one.data_ptr() for one in numbers), state_MZ.data_ptr(),
            snapshots_SZ.data_ptr(), row_R.shape[0], state_MZ.shape[0] - 1, state_MZ.shape[1],
            state_MZ.stride(0), snapshots_SZ.stride(0), table_RB.shape[1], problem.block_tokens,
            row_R.dtype == torch.int64, keeps,
        )  # fmt: skip

    return state_rows


def _kernel(*, keeps: bool) -> Kernel[StateRowsProblem]:
    return Kernel(
        name="native",
        supports=lambda problem: unsupported(problem.device, torch.float32),
        bind=lambda problem: bind_with(loaded(), problem, keeps=keeps),
        invariant=True,
    )


BEGIN_KERNEL, KEEP_KERNEL = _kernel(keeps=False), _kernel(keeps=True)
