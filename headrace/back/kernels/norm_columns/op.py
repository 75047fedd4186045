"""Rows of x, normed or as they are, written into columns of a wider tensor: what stands for a
concatenation, of an embedding and a hidden state or of several layers' hidden states, in drafters.

`bind(problem, weight_E)` returns `f(x_TE, out_TX, column, added_TE=None) -> None`: out_TX[:, column
: column + E] becomes x * w / sqrt(mean(x^2) + eps), computed in float32, or x where `eps` is None
(then without a weight). `added` is added to x first, and the sum rounded. weight float32. Rows of
all may be strided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)


class NormColumns(Protocol):
    """See the top of the file."""

    def __call__(
        self,
        x_TE: torch.Tensor,
        out_TX: torch.Tensor,
        column: int,
        added_TE: torch.Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NormColumnsProblem:
    """`eps` None: rows are written as they are."""

    device: str
    dtype: torch.dtype
    width: int
    eps: float | None


def bind_reference(problem: NormColumnsProblem, weight_E: torch.Tensor | None) -> NormColumns:
    """The reference; safe in graphs."""

    def norm_columns(
        x_TE: torch.Tensor,
        out_TX: torch.Tensor,
        column: int,
        added_TE: torch.Tensor | None = None,
    ) -> None:
        if added_TE is not None:
            x_TE = x_TE + added_TE
        to_TE = out_TX[:, column : column + problem.width]
        if problem.eps is None or weight_E is None:
            to_TE.copy_(x_TE)
            return
        x = x_TE.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + problem.eps) * weight_E
        to_TE.copy_(x)

    return norm_columns


def _sample(problem: NormColumnsProblem) -> Sample:
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    width = problem.width
    weight = random_tensor(width, **{**new, "dtype": torch.float32})
    x = random_tensor(5, width + 8, **new)[:, :width]
    out = torch.zeros(5, 2 * width, dtype=problem.dtype, device=problem.device)
    return Sample(
        problem=problem,
        weights=(None if problem.eps is None else weight,),
        arguments=(x, out, width),
        further=((x, out, 0, x[:, :width].flip(0)),),
    )


OP: Op[NormColumnsProblem] = Op(
    name="norm_columns",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.norm_columns.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
