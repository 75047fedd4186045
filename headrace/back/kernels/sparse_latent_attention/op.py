"""Attention over chosen positions of a cache of latents (DeepSeek-V3.2, "DeepSeek sparse
attention"): kernels/latent_attention of which each query sees a list.

`bind(problem, sinks_H)` returns `f(q_THW, kv, plan, chosen_TK) -> out_THC`. T query tokens, H query
heads, C `rank`, W = rank + rotary dimensions; kv [num_blocks, block_tokens, W], the step's own
latents already written. chosen_TK, int32, as kernels/index_select gives it: positions of the
query's row in rising order, none behind its own, -1 behind the last of them. Nothing else is read:

    scores = scale * q . latent[chosen]        out = softmax(scores) . latent[chosen, :rank]

With `sinks` a head's own score (float32 [H], None: there are none) takes part in its softmax, and
in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.attention.op import Plan, sample_plan
from headrace.back.kernels.latent_write.quantized import latents, random_cache
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)


class SparseLatentAttentionFunction(Protocol):
    """See the top of the file."""

    def __call__(
        self, q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SparseLatentProblem:
    """`dtype` is that of q, the output and, unless it is `quantized`, the cache."""

    device: str
    dtype: torch.dtype
    heads: int
    rank: int
    rotary: int
    top_k: int
    block_tokens: int
    scale: float
    sinks: bool = False
    quantized: str | None = None

    @property
    def width(self) -> int:
        """W: elements of a latent."""
        return self.rank + self.rotary


def bind_reference(
    problem: SparseLatentProblem, sinks_H: torch.Tensor | None = None
) -> SparseLatentAttentionFunction:
    """The reference: gathers each query's latents, and attends in float32."""
    assert problem.sinks == (sinks_H is not None), problem
    block_tokens, rank = problem.block_tokens, problem.rank

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor
    ) -> torch.Tensor:
        out_THC = q_THW.new_zeros((*q_THW.shape[:2], rank))
        for row in range(len(plan.host_kv_len)):
            for token in range(*plan.host_query_start[row : row + 2].tolist()):
                chosen_S = chosen_TK[token][chosen_TK[token] >= 0].long()
                block_S = plan.block_table_RB[row, chosen_S // block_tokens].long()
                own = latents(kv[block_S], rank, problem.quantized, problem.dtype)
                place_S = chosen_S % block_tokens
                latent_SW = own[torch.arange(len(place_S), device=kv.device), place_S].float()
                scores_HS = q_THW[token].float() @ latent_SW.T * problem.scale
                if sinks_H is not None:
                    scores_HS = torch.cat((scores_HS, sinks_H[:, None]), dim=1)
                share_HS = scores_HS.softmax(dim=-1)[:, : len(latent_SW)]
                out_THC[token] = share_HS @ latent_SW[:, :rank]
        return out_THC

    return attention


def sample_choice(
    rows: list[tuple[int, int]], top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """chosen_TK of rows of (query tokens, kv length): random positions, the own one among them."""
    lists = []
    for queries, length in rows:
        for position in range(length - queries, length):
            others = torch.randperm(position, generator=generator)[: top_k - 1]
            chosen = torch.cat((others, torch.tensor([position]))).sort()[0]
            lists.append(torch.nn.functional.pad(chosen, (0, top_k - len(chosen)), value=-1))
    return torch.stack(lists).int()


def _sample(problem: SparseLatentProblem) -> Sample:
    """Decodes and prompts beside each other, and decodes alone."""
    block = problem.block_tokens
    steps = [
        [(1, 1), (1, block + 3), (1, 600), (3, 3), (20, 20 + block)],
        [(1, 600), (1, 1), (1, 2 * block), (1, 700)],
    ]
    plans = [
        sample_plan(rows, block_tokens=block, window=None, device=problem.device) for rows in steps
    ]
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    chosen = [sample_choice(rows, problem.top_k, generator).to(problem.device) for rows in steps]
    q_THW = random_tensor(max(map(len, chosen)), problem.heads, problem.width, **new)
    blocks = max(count for _, count in plans)
    kv = random_cache((blocks, block, problem.width), problem.rank, problem.quantized, **new)
    kv[0] = -1 if problem.quantized else float("nan")
    arguments, *further = (
        (q_THW[: len(chosen_TK)], kv, plan, chosen_TK)
        for chosen_TK, (plan, _) in zip(chosen, plans, strict=True)
    )
    sinks = random_tensor(problem.heads, **{**new, "dtype": torch.float32})
    weights = (sinks if problem.sinks else None,)
    return Sample(problem=problem, weights=weights, arguments=arguments, further=tuple(further))


OP: Op[SparseLatentProblem] = Op(
    name="sparse_latent_attention",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.sparse_latent_attention.native:KERNEL",
        "headrace.back.kernels.sparse_latent_attention.triton_sparse_latent:BY_STEPS",
        "headrace.back.kernels.sparse_latent_attention.triton_sparse_latent:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
