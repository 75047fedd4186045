"""Greedy choice: `bind(problem)` returns `f(logits_NV) -> (token_N, value_N)`.

token_N int64: the lowest id among the greatest logits of a row; a NaN counts as the greatest value,
the first one wins. value_N float32: the logit at that token, so it is finite exactly if the row
holds neither NaN nor +Inf and is not all -Inf: the check of the row costs no pass of its own.
logits_NV float32, or float16 or bfloat16 on a device, V contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

Argmax = tuple[torch.Tensor, torch.Tensor]
"""The best token of each row, int64 [N], and its logit, float32 [N]."""
Greedy = Callable[[torch.Tensor], Argmax]


@dataclass(frozen=True, kw_only=True)
class GreedyProblem:
    """The same for every width and number of rows."""

    device: str


def bind_reference(problem: GreedyProblem) -> Greedy:
    """numpy's argmax on the CPU (same rule, 10 times as fast as torch's at 150 thousand columns),
    else torch's."""

    def greedy(logits_NV: torch.Tensor) -> Argmax:
        if logits_NV.device.type == "cpu":
            token_N = torch.from_numpy(logits_NV.numpy().argmax(axis=1))
        else:
            token_N = logits_NV.argmax(dim=1)
        return token_N, logits_NV.gather(1, token_N[:, None])[:, 0].float()

    return greedy


def _sample(problem: GreedyProblem) -> Sample:
    logits = random_tensor(
        4, 1003, dtype=torch.float32, device=problem.device, generator=sample_generator()
    )
    logits[1, 700], logits[2, 900], logits[2, 31] = float("nan"), 9.0, 9.0
    return Sample(problem=problem, weights=(), arguments=(logits,))


OP: Op[GreedyProblem] = Op(
    name="greedy",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.greedy.native:KERNEL",
        "headrace.back.kernels.greedy.triton_greedy:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
