"""The least probability that top_p keeps: `bind(problem)` returns `f(probs_KC, p_K1) -> least_K1`,
all float64.

Sorted in falling order, the nucleus ends at the first token at which the sum reaches p; that
token's probability is `least`, so that tokens tied with it stay. A row whose sum never reaches p
gives its smallest probability. probs are not negative; p lies in (0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator

Nucleus = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class NucleusProblem:
    """The same for every width and number of rows."""

    device: str


def bind_reference(problem: NucleusProblem) -> Nucleus:
    """The reference: sorts whole rows."""

    def nucleus(probs_KC: torch.Tensor, p_K1: torch.Tensor) -> torch.Tensor:
        sorted_KC = probs_KC.sort(dim=1, descending=True).values
        short_K1 = (sorted_KC.cumsum(1) < p_K1).sum(1, keepdim=True)
        return sorted_KC.gather(1, short_K1.clamp(max=probs_KC.shape[1] - 1))

    return nucleus


def _sample(problem: NucleusProblem) -> Sample:
    generator = sample_generator()
    logits = torch.randn(6, 1003, generator=generator, dtype=torch.float64) * 4
    logits[1] = logits[1].round()
    logits[2, 10:] = -torch.inf
    probs = logits.softmax(1)
    probs[5] *= 0.5
    p = torch.tensor([0.9, 0.5, 0.97, 1e-9, 0.999, 0.8], dtype=torch.float64)[:, None]
    return Sample(
        problem=problem,
        weights=(),
        arguments=(probs.to(problem.device), p.to(problem.device)),
    )


OP: Op[NucleusProblem] = Op(
    name="nucleus",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.nucleus.triton_nucleus:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
