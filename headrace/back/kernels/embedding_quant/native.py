"""Rows of a packed table by the native kernel. T tokens, E values of a row."""

from __future__ import annotations

import torch

from headrace.back.kernels.embedding_quant.op import Embedding, EmbeddingQuantProblem
from headrace.back.kernels.linear_quant.layout import PackedWeight
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
from headrace.back.parallel.bundle import INT8


def bind_with(
    library: NativeLibrary, problem: EmbeddingQuantProblem, table: PackedWeight
) -> Embedding:
    """The kernel of one library; keeps the table."""
    assert (table.outputs, table.inputs) == (problem.rows, problem.width)
    assert table.panels.is_contiguous() and table.form == problem.form, table.form
    grouped = () if problem.form == INT8 else (problem.form.group[1],)
    name = "embedding_fp8" if grouped else "embedding_quant"
    kernel = library.bind(name, *(POINTER,) * 3, *(INT64,) * (3 + len(grouped)), INT32)
    panels, code = table.panels, DTYPES[problem.dtype]
    rows, width, dtype = problem.rows, problem.width, problem.dtype

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
            *grouped,
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
