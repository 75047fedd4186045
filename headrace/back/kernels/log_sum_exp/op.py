"""log of the sum of exp over each row: what turns logits into log-probabilities.

`bind(problem)` returns `f(logits_MV) -> lse_M1`, float32. A row's bits depend on that row alone: torch's own reduction
cuts rows in a way that depends on how many there are, and a token's log-probability must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

LogSumExp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LogSumExpProblem:
    """`device` is a torch device type."""

    device: str


def bind_reference(problem: LogSumExpProblem) -> LogSumExp:
    """torch's, row by row."""

    def log_sum_exp(logits_MV: torch.Tensor) -> torch.Tensor:
        lse_M1 = logits_MV.new_empty(len(logits_MV), 1)
        for row_V, lse_1 in zip(logits_MV, lse_M1, strict=True):
            torch.logsumexp(row_V, 0, keepdim=True, out=lse_1)
        return lse_M1

    return log_sum_exp


def _sample(problem: LogSumExpProblem) -> Sample:
    generator = sample_generator()
    logits_MV = 4 * random_tensor(
        3, 5000, dtype=torch.float32, device=problem.device, generator=generator
    )
    logits_MV[1, 7:] = -torch.inf
    logits_MV[2] -= 300.0
    return Sample(problem=problem, weights=(), arguments=(logits_MV,))


OP: Op[LogSumExpProblem] = Op(
    name="log_sum_exp",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.log_sum_exp.triton_log_sum_exp:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 2e-6,
)
