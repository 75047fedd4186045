"""Rows into columns by the native kernel."""

from __future__ import annotations

import torch

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
from headrace.back.kernels.norm_columns.op import NormColumns, NormColumnsProblem
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 5, FLOAT, INT32)


def bind_with(
    library: NativeLibrary, problem: NormColumnsProblem, weight_E: torch.Tensor | None
) -> NormColumns:
    """The kernel of one library; keeps the weight."""
    kernel = library.bind("norm_columns", *_ARGUMENTS)
    assert (weight_E is None) == (problem.eps is None), problem
    if weight_E is not None:
        weight_E = weight_E.float().contiguous()
    size, element = problem.dtype.itemsize, DTYPES[problem.dtype]

    def norm_columns(
        x_TE: torch.Tensor,
        out_TX: torch.Tensor,
        column: int,
        added_TE: torch.Tensor | None = None,
    ) -> None:
        assert x_TE.dtype == out_TX.dtype == problem.dtype, (x_TE.dtype, out_TX.dtype)
        assert x_TE.shape == (out_TX.shape[0], problem.width), (x_TE.shape, out_TX.shape)
        assert x_TE.stride(1) == out_TX.stride(1) == 1
        assert 0 <= column <= out_TX.shape[1] - problem.width, column
        added = None if added_TE is None else added_TE.data_ptr()
        assert added_TE is None or (added_TE.shape, added_TE.stride(1)) == (x_TE.shape, 1)
        kernel(
            x_TE.data_ptr(), added, None if weight_E is None else weight_E.data_ptr(),
            out_TX.data_ptr() + column * size, x_TE.shape[0], problem.width, x_TE.stride(0),
            0 if added_TE is None else added_TE.stride(0), out_TX.stride(0), problem.eps or 0.0,
            element,
        )  # fmt: skip

    return norm_columns


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_E: bind_with(loaded(), problem, weight_E),
    invariant=True,
)
