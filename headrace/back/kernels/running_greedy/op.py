"""Greedy choice over logits that come in parts, so that whole rows of them need never be written.

`bind(problem)` returns `f(logits_NP, first, token_N, value_N) -> None`: takes in the columns first .. first + P of each
row, which have to come in order; at first 0 it does not count what token_N (int64) and value_N (float32) hold. After
the last part they are what op greedy gives for the whole rows, by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.greedy.op import bind_reference as whole_rows
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

RunningGreedy = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class RunningGreedyProblem:
    """The same for every width and number of rows."""

    device: str


def bind_reference(problem: RunningGreedyProblem) -> RunningGreedy:
    """The choice of the part, taken where it is better."""
    choose = whole_rows(GreedyProblem(device=problem.device))

    def running(
        logits_NP: torch.Tensor, first: int, token_N: torch.Tensor, value_N: torch.Tensor
    ) -> None:
        token, value = choose(logits_NP)
        # A NaN is the greatest value, and the first one wins.
        better = (value > value_N) | (value.isnan() & ~value_N.isnan())
        taken = better if first else torch.ones_like(better)
        token_N.copy_(torch.where(taken, token + first, token_N))
        value_N.copy_(torch.where(taken, value, value_N))

    return running


def _sample(problem: RunningGreedyProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    logits = random_tensor(4, 1003, **new)
    logits[1, 700], logits[2, 900], logits[2, 31] = float("nan"), 9.0, 9.0
    token = torch.tensor([5, 6, 7, 8], device=problem.device)
    value = torch.tensor([99.0, 99.0, 9.0, -1.0], device=problem.device)
    return Sample(problem=problem, weights=(), arguments=(logits, 2000, token, value))


OP: Op[RunningGreedyProblem] = Op(
    name="running_greedy",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.running_greedy.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=lambda sample: list(sample.arguments[2:]),
)
