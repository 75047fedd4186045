"""RWKV 6's recurrence by the native kernel."""

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
from headrace.back.kernels.wkv6.op import Wkv6, Wkv6Problem, check_weights
from headrace.back.kernels.wkv7.native import MAX_HEAD_DIM


def bind_with(
    library: NativeLibrary,
    problem: Wkv6Problem,
    first_C: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    bias_C: torch.Tensor | None,
) -> Wkv6:
    """The kernel of one library."""
    check_weights(problem, first_C, weight_C, bias_C)
    types = (*(POINTER,) * 9, *ROW_TYPES, *(INT64,) * 8)
    kernel = library.bind("wkv6", *types, FLOAT, INT32, INT32)
    kept = [None if one is None else one.contiguous() for one in (first_C, weight_C, bias_C)]
    pointers = [0 if one is None else one.data_ptr() for one in kept]
    sizes = problem.heads, problem.key_heads, problem.head_dim
    code = DTYPES[problem.dtype]

    def wkv6(
        r_TC: torch.Tensor,
        w_TC: torch.Tensor,
        k_TG: torch.Tensor,
        v_TG: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = r_TC, w_TC, k_TG, v_TG
        assert all(one.dtype == problem.dtype and one.stride(1) == 1 for one in inputs)
        assert state_MHKV.dtype == torch.float32 and state_MHKV[0].is_contiguous()
        y_TC = r_TC.new_empty(r_TC.shape)
        at, wide = row_arguments(rows, state_MHKV)
        kernel(
            *(one.data_ptr() for one in inputs), *pointers, y_TC.data_ptr(), state_MHKV.data_ptr(),
            *at, *sizes, *(one.stride(0) for one in inputs), state_MHKV.stride(0), problem.eps,
            wide, code,
        )  # fmt: skip
        assert kept
        return y_TC

    return wkv6


def _supports(problem: Wkv6Problem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"heads of {problem.head_dim} are above {MAX_HEAD_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
