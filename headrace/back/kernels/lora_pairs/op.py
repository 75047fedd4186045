"""What stands around the adapters of experts (op lora_linear), which have pairs of a token and an
expert for rows.

Two ops of one problem. T tokens, K slots of a token (op route), P = T * K pairs, token by token, X
experts, E width, I inner size.

lora_pairs(x_TE, slot_T, expert_TK, pairs) -> None: fills a `Pairs`. The adapter of a pair is matrix
    (slot - 1) * X + expert of the layer's, numbered from 1 as lora_linear numbers slots; 0: its
    token has no adapter (slot 0), or it has no expert (below 0).
lora_sum(y_TE, weight_TK, pairs) -> None: y[t] += sum over k of weight[t, k] * down[t, k], in
    float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)


@dataclass(frozen=True, kw_only=True)
class LoraPairsProblem:
    """`dtype` is that of x and y."""

    device: str
    dtype: torch.dtype
    experts: int
    slots: int
    width: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """slot_P int32; x_PE: each pair's token; more_PI float32 [P, 2I] and down_PE float32: what
    adapters add to gates and ups, and to downs, 0 to begin with."""

    slot_P: torch.Tensor
    x_PE: torch.Tensor
    more_PI: torch.Tensor
    down_PE: torch.Tensor


def new_pairs(problem: LoraPairsProblem, x_TE: torch.Tensor) -> Pairs:
    """Room for those of so many tokens, not filled."""
    count, floats = len(x_TE) * problem.slots, {"dtype": torch.float32}
    return Pairs(
        slot_P=x_TE.new_empty((count,), dtype=torch.int32),
        x_PE=x_TE.new_empty((count, problem.width)),
        more_PI=x_TE.new_empty((count, 2 * problem.inner), **floats),
        down_PE=x_TE.new_empty((count, problem.width), **floats),
    )


LoraPairs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pairs], None]
LoraSum = Callable[[torch.Tensor, torch.Tensor, Pairs], None]


def bind_pairs(problem: LoraPairsProblem) -> LoraPairs:
    """The reference of lora_pairs; safe in graphs."""

    def lora_pairs(
        x_TE: torch.Tensor, slot_T: torch.Tensor, expert_TK: torch.Tensor, pairs: Pairs
    ) -> None:
        has_TK = (slot_T > 0)[:, None] & (expert_TK >= 0)
        slot_TK = (slot_T[:, None] - 1) * problem.experts + expert_TK + 1
        pairs.slot_P.view(expert_TK.shape).copy_(torch.where(has_TK, slot_TK, 0))
        pairs.x_PE.view(*expert_TK.shape, problem.width).copy_(x_TE[:, None])
        pairs.more_PI.zero_()
        pairs.down_PE.zero_()

    return lora_pairs


def bind_sum(problem: LoraPairsProblem) -> LoraSum:
    """The reference of lora_sum; safe in graphs."""

    def lora_sum(y_TE: torch.Tensor, weight_TK: torch.Tensor, pairs: Pairs) -> None:
        down_TKE = pairs.down_PE.view(*weight_TK.shape, problem.width)
        y_TE.copy_(y_TE.float() + (down_TKE * weight_TK[..., None]).sum(1))

    return lora_sum


def _tokens(problem: LoraPairsProblem, tokens: int) -> tuple[torch.Tensor, ...]:
    """x, slots and experts of so many tokens, some without."""
    new = {"device": problem.device, "generator": sample_generator()}
    x_TE = random_tensor(tokens, problem.width, dtype=problem.dtype, **new)
    slot_T = torch.arange(tokens, dtype=torch.int32, device=problem.device) % 3
    place = torch.arange(tokens * problem.slots, dtype=torch.int32, device=problem.device)
    return x_TE, slot_T, place.view(tokens, -1) % (problem.experts + 1) - 1


def _pairs_sample(problem: LoraPairsProblem) -> Sample:
    x_TE, slot_T, expert_TK = _tokens(problem, 5)
    return Sample(
        problem=problem,
        weights=(),
        arguments=(x_TE, slot_T, expert_TK, new_pairs(problem, x_TE)),
    )


def _sum_sample(problem: LoraPairsProblem) -> Sample:
    x_TE, slot_T, expert_TK = _tokens(problem, 5)
    pairs = new_pairs(problem, x_TE)
    bind_pairs(problem)(x_TE, slot_T, expert_TK, pairs)
    pairs.down_PE.copy_(pairs.x_PE)
    weight_TK = torch.linspace(0, 1, expert_TK.numel(), device=problem.device)
    return Sample(
        problem=problem, weights=(), arguments=(x_TE, weight_TK.view(expert_TK.shape), pairs)
    )


def pairs_of(sample: Sample) -> list[torch.Tensor]:
    """What lora_pairs writes."""
    pairs = sample.arguments[-1]
    return [pairs.slot_P, pairs.x_PE, pairs.more_PI, pairs.down_PE]


def _op(
    name: str,
    bind: Callable[..., Callable[..., None]],
    sample: Callable[[LoraPairsProblem], Sample],
    outputs: Callable[[Sample], list[torch.Tensor]],
) -> Op[LoraPairsProblem]:
    return Op(
        name=name,
        reference=Kernel(name="torch", supports=lambda problem: None, bind=bind, invariant=True),
        kernels=(f"headrace.back.kernels.lora_pairs.native:{name.rpartition('_')[2].upper()}",),
        sample=sample,
        tolerance=lambda problem: float_tolerance(problem.dtype),
        outputs=outputs,
    )


PAIRS_OP = _op("lora_pairs", bind_pairs, _pairs_sample, pairs_of)
SUM_OP = _op("lora_sum", bind_sum, _sum_sample, lambda sample: [sample.arguments[0]])
