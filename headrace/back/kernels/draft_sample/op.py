"""Drafts that are sampled as the tokens in their places will be: from the drafter's distribution,
with the row's temperature, top_k, top_p and min_p, and with the noise of the row and position.

`bind(problem, offset_D)` returns `f(logits_RD, numbers_M, row_R, length_M, draft) -> token_R`.

    offset_D     int64 [D]: what is added to a token of the drafter's vocabulary to have the
                 model's; None: they are the same
    logits_RD    float32, D contiguous: what the drafter says of each row's draft number `draft`
                 (from 0 on), which will stand at position length + draft
    numbers_M    int64 [M, NUMBERS], the table of op `sample`; length_M int32 [M]; row_R int32 [R]
    token_R      int64, of the model's vocabulary; of a greedy row the drafter's best

The sample in the draft's place is argmax(log p + g), with g a function of row, position and token
alone (kernels/gumbel/noise.py); the draft is argmax(log q + g) with the same g. So they are equal
with a probability of at least (1 - d) / (1 + d), d being the total variation between p and q
(Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
Decoding"), where nothing can exceed 1 - d; and whether they are changes nothing of the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator
from headrace.back.kernels.sample.op import SampleProblem, numbers
from headrace.back.kernels.sample.op import bind_reference as bind_sample

DraftSample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
SampleRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits_RV, numbers_M, row_R, position_R) -> token_R, of the model's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class DraftSampleProblem:
    """`vocabulary`: V, of the model."""

    device: str
    vocabulary: int


def bind_reference(problem: DraftSampleProblem, offset_D: torch.Tensor | None) -> DraftSample:
    """The reference, by that of op `sample`."""
    sample = bind_sample(SampleProblem(device=problem.device))

    def whole(
        logits_RV: torch.Tensor, numbers_M: torch.Tensor, row_R: torch.Tensor, at_R: torch.Tensor
    ) -> torch.Tensor:
        value_R, best_R = logits_RV.max(dim=1)
        return sample(logits_RV, (best_R, value_R), numbers_M, row_R, at_R)[0]

    return over_vocabulary(whole, problem, offset_D)


def over_vocabulary(
    sample: SampleRows, problem: DraftSampleProblem, offset_D: torch.Tensor | None
) -> DraftSample:
    """The op by a function that samples whole rows of the model's vocabulary, in which tokens that
    the drafter does not know have -Inf."""
    id_D = None if offset_D is None else torch.arange(len(offset_D)).to(offset_D) + offset_D

    def draft_sample(
        logits_RD: torch.Tensor,
        numbers_M: torch.Tensor,
        row_R: torch.Tensor,
        length_M: torch.Tensor,
        draft: int,
    ) -> torch.Tensor:
        position_R = length_M.index_select(0, row_R) + draft
        if id_D is not None:
            shape = logits_RD.shape[0], problem.vocabulary
            logits_RD = logits_RD.new_full(shape, -torch.inf).index_copy_(1, id_D, logits_RD)
        return sample(logits_RD, numbers_M, row_R, position_R)

    return draft_sample


def _sample(problem: DraftSampleProblem) -> Sample:
    """Greedy and random rows of which something, or nothing, is cut off."""
    generator, device = sample_generator(), problem.device
    width = min(problem.vocabulary, 1003)
    logits = 3 * random_tensor(7, width, dtype=torch.float32, device="cpu", generator=generator)
    logits[3] = logits[3].round()
    table = numbers(
        heat=np.array([0.7, 0.0, 1.0, 1.3, 0.5, 1e-3, 1.0, 0.0]),
        seed=np.arange(8, dtype=np.uint64),
        top_k=np.array([0, 3, 0, 40, 0, 0, 7, 0]),
        top_p=np.array([1.0, 0.5, 0.9, 0.8, 0.99, 1.0, 1.0, 1.0]),
        min_p=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
    )
    spread_D = torch.arange(width) * (problem.vocabulary // width - 1)
    row_R = torch.tensor([6, 1, 2, 3, 4, 5, 0], dtype=torch.int32)
    length_M = torch.arange(3, 11, dtype=torch.int32)
    tensors = (logits, torch.from_numpy(table), row_R, length_M)
    calls = [(*(tensor.to(device) for tensor in tensors), draft) for draft in range(4)]
    offset_D = spread_D.to(device) if problem.vocabulary > width else None
    return Sample(
        problem=problem, weights=(offset_D,), arguments=calls[0], further=tuple(calls[1:])
    )


OP: Op[DraftSampleProblem] = Op(
    name="draft_sample",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.draft_sample.native:KERNEL",
        "headrace.back.kernels.draft_sample.triton_draft_sample:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
