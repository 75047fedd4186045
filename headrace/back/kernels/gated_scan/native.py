"""A gated linear recurrence by the native kernel, and what wrappers of recurrent kernels share."""

from __future__ import annotations

from typing import Any

import torch

from headrace.back.kernels.gated_scan.op import GatedScan, GatedScanProblem, ScanRows
from headrace.back.kernels.native.library import (
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

ROW_TYPES = (POINTER, POINTER, INT64, INT64, INT64)


def row_arguments(rows: ScanRows, state: torch.Tensor) -> tuple[tuple[Any, ...], int]:
    """Rows and first tokens, how many there are in the step and in the state, and further states of
    a row that are kept; and whether rows are int64."""
    row_R, start_R1 = rows.row_R, rows.query_start_R1
    assert row_R.is_contiguous() and start_R1.is_contiguous() and start_R1.dtype == torch.int32
    assert start_R1.shape[0] == row_R.shape[0] + 1, (start_R1.shape, row_R.shape)
    assert row_R.dtype in (torch.int32, torch.int64), row_R.dtype
    assert state.stride(-1) == 1, state.stride()
    pointers = row_R.data_ptr(), start_R1.data_ptr()
    counts = row_R.shape[0], rows.padding(state), rows.depth
    return (*pointers, *counts), int(row_R.dtype == torch.int64)


def bind_with(library: NativeLibrary, problem: GatedScanProblem) -> GatedScan:
    """The kernel of one library."""
    kernel = library.bind("gated_scan", *(POINTER,) * 4, *ROW_TYPES, INT64, INT64, INT32)

    def gated_scan(
        gate_TE: torch.Tensor, x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        assert gate_TE.is_contiguous() and x_TE.is_contiguous(), (gate_TE.stride(), x_TE.stride())
        assert gate_TE.dtype == x_TE.dtype == state_ME.dtype == torch.float32, x_TE.dtype
        y_TE = x_TE.new_empty(x_TE.shape)
        at, wide = row_arguments(rows, state_ME)
        kernel(
            gate_TE.data_ptr(), x_TE.data_ptr(), y_TE.data_ptr(), state_ME.data_ptr(), *at,
            x_TE.shape[1], state_ME.stride(0), wide,
        )  # fmt: skip
        return y_TE

    return gated_scan


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)
