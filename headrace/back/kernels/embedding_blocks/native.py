"""Rows of a block-quantized table by the native kernel. T tokens, E values of a row."""

from __future__ import annotations

import torch

from headrace.back.kernels.embedding_blocks.op import Embedding, EmbeddingBlocksProblem
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, BlockWeight
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

_ARGUMENTS = (*(POINTER,) * 3, *(INT64,) * 4, INT32)


def bind_with(
    library: NativeLibrary, problem: EmbeddingBlocksProblem, table: BlockWeight
) -> Embedding:
    """The kernel of one library; keeps the table."""
    assert table.kinds == ((problem.layout, problem.rows),) and table.inputs == problem.width
    kernel = library.bind("embedding_blocks", *_ARGUMENTS)
    panels, code = table.segments[0].panels, DTYPES[problem.dtype]
    rows, width, dtype = problem.rows, problem.width, problem.dtype
    number = LAYOUTS[problem.layout].number
    assert panels.is_contiguous()

    def embedding(ids_T: torch.Tensor) -> torch.Tensor:
        ids_T = ids_T.contiguous()
        assert ids_T.dtype == torch.int64, ids_T.dtype
        x_TE = torch.empty(len(ids_T), width, dtype=dtype)
        kernel(
            ids_T.data_ptr(),
            panels.data_ptr(),
            x_TE.data_ptr(),
            len(ids_T),
            rows,
            width,
            number,
            code,
        )
        return x_TE

    return embedding


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, table: bind_with(loaded(), problem, table),
    invariant=True,
)
