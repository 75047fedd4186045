"""What low-rank adapters add to a linear layer: y += scale * (x A^T) B^T, each row by the adapter
in its slot (Hu et al. 2021, "LoRA", section 4.1; many adapters in one product: Chen et al. 2023,
"Punica").

`bind(problem, weights)` returns `f(x_TI, y_TO, slot_T) -> None`, which changes y in place. T rows,
I inputs, O outputs, S slots, R the most ranks, P parts: outputs that lie side by side in y, each
with an A of its own (query, key, value).

    slot_T    int32: 0 leaves the row as it is, s is row s - 1 of the weights
    a_SKI     [S, P * R, I]: the A of part p begins at row p * R
    b_SRO     [S, R, O]: B transposed, of all parts side by side
    scale_SP  float32
    turn_S2O  float32: with `turned` problems, y of a row becomes turn[0] * y + turn[1] first, where
              its adapter changes the part at all (magnitudes: Liu et al. 2024, "DoRA")
    rank_SP   int32: ranks in use, at most R; 0: the adapter does not change this part. What lies
              beyond is not read

x and y may have row strides of their own. Sums are float32; y is rounded once, and float32 itself
in `wide` problems.
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

LoraLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class LoraLinearProblem:
    """`parts`: outputs of each. `rank`: R. `slots`: S. `dtype` is that of x, y, A and B, but of y
    in `wide` problems."""

    device: str
    dtype: torch.dtype
    inputs: int
    parts: tuple[int, ...]
    rank: int
    slots: int
    turned: bool = False
    wide: bool = False

    @property
    def y_dtype(self) -> torch.dtype:
        """That of y."""
        return torch.float32 if self.wide else self.dtype

    @property
    def outputs(self) -> int:
        """O."""
        return sum(self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraWeights:
    """The slots' tensors, which change while steps run: a slot is written while no row has it."""

    a_SKI: torch.Tensor
    b_SRO: torch.Tensor
    scale_SP: torch.Tensor
    rank_SP: torch.Tensor
    turn_S2O: torch.Tensor | None = None


def empty_weights(problem: LoraLinearProblem, device: torch.device) -> LoraWeights:
    """Slots without adapters."""
    slots, parts = problem.slots, len(problem.parts)
    a_shape = (slots, parts * problem.rank, problem.inputs)
    b_shape = (slots, problem.rank, problem.outputs)
    return LoraWeights(
        a_SKI=torch.zeros(a_shape, dtype=problem.dtype, device=device),
        b_SRO=torch.zeros(b_shape, dtype=problem.dtype, device=device),
        scale_SP=torch.zeros((slots, parts), dtype=torch.float32, device=device),
        rank_SP=torch.zeros((slots, parts), dtype=torch.int32, device=device),
        turn_S2O=_unturned(problem, device) if problem.turned else None,
    )


def _unturned(problem: LoraLinearProblem, device: torch.device) -> torch.Tensor:
    turn_S2O = torch.zeros((problem.slots, 2, problem.outputs), dtype=torch.float32, device=device)
    turn_S2O[:, 0] = 1.0
    return turn_S2O


def check_weights(problem: LoraLinearProblem, weights: LoraWeights) -> None:
    """Asserts that the slots are those of the problem."""
    slots, parts, rank = problem.slots, len(problem.parts), problem.rank
    assert weights.a_SKI.shape == (slots, parts * rank, problem.inputs), weights.a_SKI.shape
    assert weights.b_SRO.shape == (slots, rank, problem.outputs), weights.b_SRO.shape
    assert weights.a_SKI.dtype == weights.b_SRO.dtype == problem.dtype, problem
    assert weights.scale_SP.shape == weights.rank_SP.shape == (slots, parts), problem
    assert weights.scale_SP.dtype == torch.float32 and weights.rank_SP.dtype == torch.int32
    tensors = [weights.a_SKI, weights.b_SRO, weights.scale_SP, weights.rank_SP]
    assert (weights.turn_S2O is not None) == problem.turned, problem
    if weights.turn_S2O is not None:
        assert weights.turn_S2O.shape == (slots, 2, problem.outputs), weights.turn_S2O.shape
        tensors.append(weights.turn_S2O)
    assert all(tensor.is_contiguous() for tensor in tensors)


def bind_reference(problem: LoraLinearProblem, weights: LoraWeights) -> LoraLinear:
    """The reference: every row by every slot, masked, so that no value is asked for by the host."""
    check_weights(problem, weights)
    rank_J = torch.arange(problem.rank, device=weights.a_SKI.device)

    def lora_linear(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        wide_TI, sum_TO = x_TI.float(), y_TO.float()
        for slot in range(problem.slots):
            mine_T1 = (slot_T == slot + 1)[:, None]
            first = 0
            for part, size in enumerate(problem.parts):
                a_JI = weights.a_SKI[slot, part * problem.rank :][: problem.rank].float()
                b_JO = weights.b_SRO[slot, :, first : first + size].float()
                used_J = rank_J < weights.rank_SP[slot, part]
                z_TJ = (wide_TI @ a_JI.T).masked_fill(~used_J, 0.0) * weights.scale_SP[slot, part]
                delta_TO = z_TJ @ b_JO.masked_fill(~used_J[:, None], 0.0)
                own = slice(first, first + size)
                if weights.turn_S2O is not None:
                    factor_O, shift_O = weights.turn_S2O[slot, :, own]
                    turned_TO = sum_TO[:, own] * factor_O + shift_O
                    here_T1 = mine_T1 & (weights.rank_SP[slot, part] > 0)
                    sum_TO[:, own] = torch.where(here_T1, turned_TO, sum_TO[:, own])
                sum_TO[:, own] += delta_TO.masked_fill(~mine_T1, 0.0)
                first += size
        y_TO.copy_(sum_TO)

    return lora_linear


def sample_weights(problem: LoraLinearProblem) -> LoraWeights:
    """Slots of several ranks: all of them, half, and in the last slot's first part none."""
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    slots, parts, rank = problem.slots, len(problem.parts), problem.rank
    a_SKI = random_tensor(slots, parts * rank, problem.inputs, **new) / problem.inputs**0.5
    b_SRO = random_tensor(slots, rank, problem.outputs, **new) / rank**0.5
    scale = torch.arange(1, slots * parts + 1).view(slots, parts) / (slots * parts)
    ranks = torch.full((slots, parts), rank, dtype=torch.int32)
    ranks[::2] = -(-rank // 2)
    ranks[-1, 0] = 0
    turn_S2O = None
    if problem.turned:
        turn_S2O = (
            1 + random_tensor(slots, 2, problem.outputs, **{**new, "dtype": torch.float32}) / 8
        )
    return LoraWeights(
        a_SKI=a_SKI,
        b_SRO=b_SRO,
        scale_SP=scale.to(problem.device, torch.float32),
        rank_SP=ranks.to(problem.device),
        turn_S2O=turn_S2O,
    )


def sample_rows(
    problem: LoraLinearProblem, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y and slots of so many rows, those without an adapter among them."""
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    slot_T = (torch.arange(rows, dtype=torch.int32) * 3 + 1) % (problem.slots + 1)
    return (
        random_tensor(rows, problem.inputs, **new),
        random_tensor(rows, problem.outputs, **new).to(problem.y_dtype),
        slot_T.to(problem.device),
    )


def _sample(problem: LoraLinearProblem) -> Sample:
    return Sample(
        problem=problem,
        weights=(sample_weights(problem),),
        arguments=sample_rows(problem, 5),
        further=(sample_rows(problem, 1), sample_rows(problem, 80)),
    )


def second_arguments(sample: Sample) -> list[torch.Tensor]:
    """What is compared of an op that changes its second argument: that one, of every call."""
    return [arguments[1] for arguments in (sample.arguments, *sample.further)]


OP: Op[LoraLinearProblem] = Op(
    name="lora_linear",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.lora_linear.native:KERNEL",
        "headrace.back.kernels.lora_linear.triton_lora_linear:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
    outputs=second_arguments,
)
