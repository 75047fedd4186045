"""The greatest results of a GEMM, for an output head of which nobody reads whole rows of logits.

`bind(problem, weight)` returns `f(x_TI) -> (id_TC int64, value_TC float32)`: of each row the
`count` best results that the GEMM would give in float32 (its `wide`), best first. The order is that
of op greedy: a NaN before all numbers, then greater values, among equal ones the lower output. T
tokens, I inputs, C count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear import op as linear
from headrace.back.kernels.linear_blocks import op as linear_blocks
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_quant import op as linear_quant
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance

LinearTop = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Gemm = linear.LinearProblem | linear_quant.LinearQuantProblem | linear_blocks.LinearBlocksProblem
Weight = torch.Tensor | PackedWeight | BlockWeight

MAX_COUNT = 64
"""The greatest count of a kernel: more would be sorted faster than kept in order."""
NUM_CANDIDATES = 24
"""The count with which output heads serve sampling. The kernels' time grows with it: with more than
32 a step takes longer than one that writes all logits and samples from them
(benchmarks/cpu/fused.py)."""


@dataclass(frozen=True, kw_only=True)
class LinearTopProblem:
    """`gemm`: wide, without a bias, an activation or quantized rows."""

    gemm: Gemm
    count: int

    @property
    def device(self) -> str:
        """Where."""
        return self.gemm.device


def bind_reference(problem: LinearTopProblem, weight: Weight) -> LinearTop:
    """Whole rows in float32, sorted."""
    gemm = _gemm(problem.gemm, weight)

    def top(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value_TO, id_TO = gemm(x_TI).sort(dim=1, descending=True, stable=True)
        return id_TO[:, : problem.count], value_TO[:, : problem.count]

    return top


def _gemm(problem: Gemm, weight: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(problem, linear_quant.LinearQuantProblem):
        return linear_quant.bind_reference(problem, weight, None)
    if isinstance(problem, linear_blocks.LinearBlocksProblem):
        return linear_blocks.bind_reference(problem, weight, None)
    return lambda x_TI: F.linear(x_TI.float(), weight.float())


def _sample(problem: LinearTopProblem) -> Sample:
    gemm = problem.gemm
    op: Op[Any] = (
        linear_quant.OP
        if isinstance(gemm, linear_quant.LinearQuantProblem)
        else linear_blocks.OP
        if isinstance(gemm, linear_blocks.LinearBlocksProblem)
        else linear.OP
    )
    sample = op.sample(gemm)
    count = min(problem.count, sample.problem.outputs)
    return Sample(
        problem=replace(problem, gemm=sample.problem, count=count),
        weights=sample.weights[:1],
        arguments=sample.arguments,
    )


OP: Op[LinearTopProblem] = Op(
    name="linear_top",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_top.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(torch.float32),
)
