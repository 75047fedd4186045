"""Rows of a block-quantized table: value * scale - minimum in float32, rounded once.

`bind(problem, table)` returns `f(ids_T) -> x_TE`. ids are int64 in [0, V); the table has one
segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.linear_blocks.layout import (
    LAYOUTS,
    PANEL,
    BlockWeight,
    dequantize_rows,
)
from headrace.back.kernels.linear_blocks.op import random_segment
from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator

Embedding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class EmbeddingBlocksProblem:
    """V `rows` of E `width` values in `layout`; `dtype` is that of the result."""

    device: str
    dtype: torch.dtype
    layout: str
    rows: int
    width: int


def bind_reference(problem: EmbeddingBlocksProblem, table: BlockWeight) -> Embedding:
    """The layout's own reading of rows."""
    (segment,) = table.segments

    def embedding(ids_T: torch.Tensor) -> torch.Tensor:
        return dequantize_rows(segment, ids_T).to(problem.dtype)

    return embedding


def _sample(problem: EmbeddingBlocksProblem) -> Sample:
    rows = min(problem.rows, PANEL + problem.rows % PANEL)
    small = replace(problem, rows=rows, width=min(problem.width, 512))
    segment = random_segment(LAYOUTS[small.layout], rows, small.width, sample_generator())
    ids = torch.tensor([0, rows - 1, rows // 2, 0], device=problem.device)
    return Sample(problem=small, weights=(BlockWeight(small.width, (segment,)),), arguments=(ids,))


OP: Op[EmbeddingBlocksProblem] = Op(
    name="embedding_blocks",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.embedding_blocks.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
