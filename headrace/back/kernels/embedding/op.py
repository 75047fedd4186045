"""Rows of a table: `bind(problem, table_VE)` returns `f(ids_T) -> x_TE`. ids are int64 in [0,
V)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

Embedding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class EmbeddingProblem:
    """V `rows` of E `width` values, times `scale`, in float32 and rounded once."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    scale: float = 1.0


def bind_reference(problem: EmbeddingProblem, table_VE: torch.Tensor) -> Embedding:
    """torch's own lookup."""

    def embedding(ids_T: torch.Tensor) -> torch.Tensor:
        x_TE = F.embedding(ids_T, table_VE)
        return x_TE if problem.scale == 1.0 else x_TE.mul_(problem.scale)

    return embedding


def _sample(problem: EmbeddingProblem) -> Sample:
    problem = replace(problem, rows=min(problem.rows, 64))
    table = random_tensor(
        problem.rows,
        problem.width,
        dtype=problem.dtype,
        device=problem.device,
        generator=sample_generator(),
    )
    ids = torch.tensor([0, problem.rows - 1, problem.rows // 2, 0], device=problem.device)
    return Sample(problem=problem, weights=(table,), arguments=(ids,))


OP: Op[EmbeddingProblem] = Op(
    name="embedding",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.embedding.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
