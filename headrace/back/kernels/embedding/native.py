"""Embedding lookup by the native kernel: rows copied, or scaled on the way."""

from __future__ import annotations

import torch

from headrace.back.kernels.embedding.op import Embedding, EmbeddingProblem
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


def bind_with(
    library: NativeLibrary, problem: EmbeddingProblem, table_VE: torch.Tensor
) -> Embedding:
    """The kernel of one library; keeps the table."""
    assert table_VE.dtype == problem.dtype and table_VE.stride(1) == 1, table_VE.stride()
    kernel = library.bind("embedding", *(POINTER,) * 3, *(INT64,) * 4, FLOAT, INT32)
    rows, width = table_VE.shape
    element = DTYPES[problem.dtype]

    def embedding(ids_T: torch.Tensor) -> torch.Tensor:
        assert ids_T.dtype == torch.int64 and ids_T.is_contiguous(), ids_T.dtype
        x_TE = table_VE.new_empty(ids_T.shape[0], width)
        kernel(
            ids_T.data_ptr(), table_VE.data_ptr(), x_TE.data_ptr(),
            ids_T.shape[0], rows, width, table_VE.stride(0), problem.scale, element,
        )  # fmt: skip
        return x_TE

    return embedding


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, table_VE: bind_with(loaded(), problem, table_VE),
    invariant=True,
)
