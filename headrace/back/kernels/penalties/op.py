"""Repetition, presence and frequency penalties on logits, in place (sampling/penalties.py says what
they mean).

`bind(problem)` returns `f(logits_KV, counts_SV, numbers_S3, slot_K, seen, drafts_KD=None)`.

    logits_KV    float32, V contiguous
    counts_SV    int32, contiguous: how often a token is in the output, plus PROMPT if it is in the
                 prompt; 0 exactly if
                 it is in neither
    numbers_S3   float32, contiguous: repetition, presence, frequency
    slot_K       int64: the slot of each row in both tables
    seen         () -> int64 [K, L]: all tokens in prompt and output, maybe others too, in any
                 order, however often; for
                 what does not look for them in the table
    drafts_KD    int64, contiguous: tokens of the output that the table has not counted; -1: none
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

PROMPT = 1 << 30
Seen = Callable[[], torch.Tensor]


class Penalise(Protocol):
    """See the top of the file."""

    def __call__(
        self,
        logits_KV: torch.Tensor,
        counts_SV: torch.Tensor,
        numbers_S3: torch.Tensor,
        slot_K: torch.Tensor,
        seen: Seen,
        drafts_KD: torch.Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PenaltiesProblem:
    """The same for every width and number of rows. `device` is a torch device type."""

    device: str


def bind_reference(problem: PenaltiesProblem) -> Penalise:
    """Rewrites the tokens seen: it costs the context, not the vocabulary. One seen twice is written
    twice, with the same value; one that is not seen keeps its own."""

    def penalise(
        logits_KV: torch.Tensor,
        counts_SV: torch.Tensor,
        numbers_S3: torch.Tensor,
        slot_K: torch.Tensor,
        seen: Seen,
        drafts_KD: torch.Tensor | None = None,
    ) -> None:
        seen_KL = seen()
        repetition_K1, presence_K1, frequency_K1 = numbers_S3[slot_K].split(1, dim=1)
        at_KL = slot_K[:, None] * counts_SV.shape[1] + seen_KL
        count_KL = counts_SV.view(-1)[at_KL]
        for draft_K1 in () if drafts_KD is None else drafts_KD.split(1, dim=1):
            count_KL += (seen_KL == draft_K1).to(torch.int32)
        unseen_KL, count_KL = count_KL == 0, count_KL & (PROMPT - 1)
        logit_KL = logits_KV.gather(1, seen_KL)
        less_KL = torch.where(logit_KL > 0, logit_KL / repetition_K1, logit_KL * repetition_K1)
        less_KL.sub_(count_KL * frequency_K1).sub_((count_KL > 0) * presence_K1)
        logits_KV.scatter_(1, seen_KL, torch.where(unseen_KL, logit_KL, less_KL))

    return penalise


def _sample(problem: PenaltiesProblem) -> Sample:
    generator = sample_generator()
    width, seen_KL = 5008, torch.randint(5008, (3, 700), generator=generator)
    logits_KV = 4 * random_tensor(3, width, dtype=torch.float32, device="cpu", generator=generator)
    logits_KV[1, ::3] = -torch.inf
    slot_K, counts_SV = torch.tensor([3, 0, 2]), torch.zeros(4, width, dtype=torch.int32)
    for slot, row in zip(slot_K.tolist(), seen_KL, strict=True):
        counts_SV[slot] = row[200:].bincount(minlength=width)
        counts_SV[slot, row[:200]] += PROMPT
    drafts_KD = torch.full((3, 3), -1)
    drafts_KD[0, :2], drafts_KD[2] = seen_KL[0, 0], seen_KL[2, 400:403]
    counts_SV[3, seen_KL[0, 0]] = 0  # a token that stands in drafts alone
    numbers = [[1.3, 0.5, 0.2], [9.0, 9.0, 9.0], [0.7, -0.5, 0.1], [1.0, 0.0, -0.3]]
    tensors = (logits_KV, counts_SV, torch.tensor(numbers), slot_K)
    seen_KL = seen_KL.to(problem.device)
    return Sample(
        problem=problem,
        weights=(),
        arguments=(
            *(one.to(problem.device) for one in tensors),
            lambda: seen_KL,
            drafts_KD.to(problem.device),
        ),
    )


OP: Op[PenaltiesProblem] = Op(
    name="penalties",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.penalties.triton_penalties:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=lambda sample: [sample.arguments[0]],
)
