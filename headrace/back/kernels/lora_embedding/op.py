"""What low-rank adapters add to a table of tokens: x += scale * B A[id], each token by the adapter
in its slot (Hu et al. 2021, "LoRA", section 4.1).

`bind(problem, weights)` returns `f(ids_T, x_TE, slot_T) -> None`, which changes x in place. T
tokens, V rows of the table, E its width, S slots, R the most ranks.

    ids_T     int64, 0 .. V - 1
    slot_T    int32: 0 leaves the token as it is, s is row s - 1 of the weights
    a_SVR     [S, V, R]: A transposed
    b_SRE     [S, R, E]: B transposed
    scale_S   float32
    rank_S    int32: ranks in use, at most R; what lies beyond is not read

Sums are float32; x is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.lora_linear.op import second_arguments
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

LoraEmbedding = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class LoraEmbeddingProblem:
    """`rows`: V. `rank`: R. `slots`: S. `dtype` is that of x, A and B."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    rank: int
    slots: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraTables:
    """The slots' tensors, which change while steps run: a slot is written while no row has it."""

    a_SVR: torch.Tensor
    b_SRE: torch.Tensor
    scale_S: torch.Tensor
    rank_S: torch.Tensor


def empty_tables(problem: LoraEmbeddingProblem, device: torch.device) -> LoraTables:
    """Slots without adapters."""
    slots, rank = problem.slots, problem.rank
    new = {"dtype": problem.dtype, "device": device}
    return LoraTables(
        a_SVR=torch.zeros((slots, problem.rows, rank), **new),
        b_SRE=torch.zeros((slots, rank, problem.width), **new),
        scale_S=torch.zeros(slots, dtype=torch.float32, device=device),
        rank_S=torch.zeros(slots, dtype=torch.int32, device=device),
    )


def bind_reference(problem: LoraEmbeddingProblem, tables: LoraTables) -> LoraEmbedding:
    """The reference: gathered, without asking the host for a value."""
    rank_R = torch.arange(problem.rank, device=tables.a_SVR.device)

    def lora_embedding(ids_T: torch.Tensor, x_TE: torch.Tensor, slot_T: torch.Tensor) -> None:
        at_T = (slot_T - 1).clamp(min=0).long()
        used_TR = (rank_R < tables.rank_S[at_T, None]) & (slot_T > 0)[:, None]
        a_TR = tables.a_SVR[at_T, ids_T].float().masked_fill(~used_TR, 0.0)
        b_TRE = tables.b_SRE[at_T].float().masked_fill(~used_TR[:, :, None], 0.0)
        sum_TE = torch.einsum("tr,tre->te", a_TR * tables.scale_S[at_T, None], b_TRE)
        x_TE.copy_(x_TE.float() + sum_TE)

    return lora_embedding


def sample_tables(problem: LoraEmbeddingProblem) -> LoraTables:
    """Slots of several ranks."""
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    slots, rank = problem.slots, problem.rank
    ranks = torch.full((slots,), rank, dtype=torch.int32)
    ranks[::2] = -(-rank // 2)
    return LoraTables(
        a_SVR=random_tensor(slots, problem.rows, rank, **new),
        b_SRE=random_tensor(slots, rank, problem.width, **new) / rank**0.5,
        scale_S=(torch.arange(1, slots + 1) / slots).to(problem.device, torch.float32),
        rank_S=ranks.to(problem.device),
    )


def sample_tokens(
    problem: LoraEmbeddingProblem, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, x and slots of so many tokens, those without an adapter among them."""
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    at_T = torch.arange(tokens)
    slot_T = ((at_T * 3 + 1) % (problem.slots + 1)).to(problem.device, torch.int32)
    ids_T = (at_T * 37 % problem.rows).to(problem.device)
    return ids_T, random_tensor(tokens, problem.width, **new), slot_T


def _sample(problem: LoraEmbeddingProblem) -> Sample:
    small = LoraEmbeddingProblem(**{**vars(problem), "rows": min(problem.rows, 96)})
    return Sample(
        problem=small,
        weights=(sample_tables(small),),
        arguments=sample_tokens(small, 5),
        further=(sample_tokens(small, 1), sample_tokens(small, 70)),
    )


OP: Op[LoraEmbeddingProblem] = Op(
    name="lora_embedding",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.lora_embedding.native:KERNEL",
        "headrace.back.kernels.lora_embedding.triton_lora_embedding:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
    outputs=second_arguments,
)
