"""Rows of a packed int8 or e4m3 table, for embeddings tied to a quantized head: value * scale,
rounded once.

`bind(problem, table)` returns `f(ids_T) -> x_TE`. ids are int64 in [0, V).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.linear_quant.layout import PANEL, PackedWeight, dequantize_rows
from headrace.back.kernels.linear_quant.op import LinearQuantProblem, random_weight
from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator
from headrace.back.parallel.bundle import INT8, WeightForm

Embedding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class EmbeddingQuantProblem:
    """V `rows` of E `width` values of a `form` (linear_quant/layout.py); `dtype` is that of the
    result."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    form: WeightForm = INT8


def bind_reference(problem: EmbeddingQuantProblem, table: PackedWeight) -> Embedding:
    """The layout's own reading of rows."""

    def embedding(ids_T: torch.Tensor) -> torch.Tensor:
        return dequantize_rows(table, ids_T).to(problem.dtype)

    return embedding


def _sample(problem: EmbeddingQuantProblem) -> Sample:
    rows = min(problem.rows, PANEL + problem.rows % PANEL)
    shape = LinearQuantProblem(
        device=problem.device,
        dtype=problem.dtype,
        inputs=problem.width,
        outputs=rows,
        form=problem.form,
    )
    table = random_weight(shape, sample_generator())
    ids = torch.tensor([0, rows - 1, rows // 2, 0], device=problem.device)
    return Sample(problem=replace(problem, rows=rows), weights=(table,), arguments=(ids,))


OP: Op[EmbeddingQuantProblem] = Op(
    name="embedding_quant",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.embedding_quant.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
