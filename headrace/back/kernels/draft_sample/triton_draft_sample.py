"""The op by Triton's greedy choice and sampling over the model's vocabulary."""

from __future__ import annotations

import torch

from headrace.back.kernels.draft_sample.op import DraftSample, DraftSampleProblem, over_vocabulary
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.greedy.triton_greedy import KERNEL as GREEDY
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sample.op import SampleProblem
from headrace.back.kernels.sample.triton_sample import KERNEL as SAMPLE
from headrace.back.kernels.triton.wrap import unsupported


def bind(problem: DraftSampleProblem, offset_D: torch.Tensor | None) -> DraftSample:
    """See the op."""
    greedy = GREEDY.bind(GreedyProblem(device=problem.device))
    sample = SAMPLE.bind(SampleProblem(device=problem.device))

    def whole(
        logits_RV: torch.Tensor, numbers_M: torch.Tensor, row_R: torch.Tensor, at_R: torch.Tensor
    ) -> torch.Tensor:
        token_R: torch.Tensor = sample(logits_RV, greedy(logits_RV), numbers_M, row_R, at_R)[0]
        return token_R

    return over_vocabulary(whole, problem, offset_D)


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=GREEDY.invariant and SAMPLE.invariant,
)
