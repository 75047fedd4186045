"""RWKV 7's recurrence by the native kernel."""

from __future__ import annotations

from typing import Any

import torch

from headrace.back.kernels.gated_scan.native import ROW_TYPES, row_arguments
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
from headrace.back.kernels.wkv7.op import Wkv7, Wkv7Problem, check_weights

MAX_HEAD_DIM = 256
INPUTS = 7


def bind_with(library: NativeLibrary, problem: Wkv7Problem, *weights: torch.Tensor | None) -> Wkv7:
    """The kernel of one library."""
    check_weights(problem, *weights)
    types = (*(POINTER,) * (INPUTS + 5 + 2), *ROW_TYPES, *(INT64,) * (INPUTS + 3))
    kernel = library.bind("wkv7", *types, FLOAT, INT32, INT32)
    kept = [None if one is None else one.contiguous() for one in weights]
    pointers = [0 if one is None else one.data_ptr() for one in kept]
    count, code = (INPUTS if problem.mixes else INPUTS - 2), DTYPES[problem.dtype]

    def wkv7(*arguments: Any) -> torch.Tensor:
        *inputs, state_MHKV, rows = arguments
        assert len(inputs) == count, (len(inputs), problem)
        assert all(one.dtype == problem.dtype and one.stride(1) == 1 for one in inputs)
        assert state_MHKV.dtype == torch.float32 and state_MHKV[0].is_contiguous()
        y_TC = inputs[0].new_empty(inputs[0].shape)
        at, wide = row_arguments(rows, state_MHKV)
        none = (0,) * (INPUTS - count)
        kernel(
            *(one.data_ptr() for one in inputs), *none, *pointers, y_TC.data_ptr(),
            state_MHKV.data_ptr(), *at, problem.heads, problem.head_dim,
            *(one.stride(0) for one in inputs), *none, state_MHKV.stride(0), problem.eps, wide,
            code,
        )  # fmt: skip
        assert kept
        return y_TC

    return wkv7


def _supports(problem: Wkv7Problem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"heads of {problem.head_dim} are above {MAX_HEAD_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
