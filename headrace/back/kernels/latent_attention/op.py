"""Attention over a cache of latents: one vector per token, the key of every query head, whose first
part is the value too (multi-head latent attention in its absorbed form, DeepSeek-V2, section 2.1).

`bind(problem)` returns `f(q_THW, kv, plan, lse_TH=None) -> out_THC`. T query tokens, H query heads,
C `rank`, W = rank + rotary dimensions; kv [num_blocks, block_tokens, W], the step's own latents
already written; a `quantized` one ("fp8", "int8") lies as kernels/latent_write/quantized.py says.
Queries see positions as in kernels/attention/op.py, whose `Plan` it is:

    scores = scale * q . latent[position]        out = softmax(scores) . latent[positions, :rank]

A head's own key and value weights are applied before and behind (layers/latent_attention.py).
`lse_TH` and the rules that kernels keep are those of kernels/attention/op.py.
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


class LatentAttentionFunction(Protocol):
    """See the top of the file."""

    def __call__(
        self,
        q_THW: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        lse_TH: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LatentAttentionProblem:
    """`dtype` is that of q, the output and, unless it is `quantized`, the cache."""

    device: str
    dtype: torch.dtype
    heads: int
    rank: int
    rotary: int
    block_tokens: int
    scale: float
    quantized: str | None = None

    @property
    def width(self) -> int:
        """W: elements of a latent."""
        return self.rank + self.rotary


def bind_reference(problem: LatentAttentionProblem) -> LatentAttentionFunction:
    """The reference: a row at a time, in float32; a problem of float64 in float64."""
    wide = torch.promote_types(problem.dtype, torch.float32)

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        out_THC = q_THW.new_zeros((*q_THW.shape[:2], problem.rank))
        if lse_TH is not None:
            lse_TH.fill_(float("-inf"))
        for row, length in enumerate(plan.host_kv_len.tolist()):
            begin, end = plan.host_query_start[row : row + 2].tolist()
            if begin == end:
                continue
            blocks = plan.block_table_RB[row, : -(-length // problem.block_tokens)].long()
            own = latents(kv[blocks], problem.rank, problem.quantized, problem.dtype)
            latent_SW = own.flatten(0, 1)[:length].to(wide)
            scores_HQS = q_THW[begin:end].to(wide).transpose(0, 1) @ latent_SW.T * problem.scale
            position_Q1 = torch.arange(length - (end - begin), length, device=kv.device)[:, None]
            hidden_QS = torch.arange(length, device=kv.device) > position_Q1
            scores_HQS.masked_fill_(hidden_QS, float("-inf"))
            if lse_TH is not None:
                lse_TH[begin:end] = scores_HQS.logsumexp(dim=-1).T
            value_HQC = scores_HQS.softmax(dim=-1) @ latent_SW[:, : problem.rank]
            out_THC[begin:end] = value_HQC.transpose(0, 1).to(out_THC.dtype)
        return out_THC

    return attention


def _sample(problem: LatentAttentionProblem) -> Sample:
    """Decodes and prompts beside each other, a few queries in every row, decodes alone."""
    block = problem.block_tokens
    steps = [
        [(1, 1), (1, block + 3), (1, 600), (3, 3), (20, 20 + block)],
        [(1, block), (2, 2), (6, 600), (4, 4 + block)],
        [(1, 600), (1, 1), (1, 2 * block), (1, 700)],
    ]
    plans = [
        sample_plan(rows, block_tokens=block, window=None, device=problem.device) for rows in steps
    ]
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    tokens = [sum(queries for queries, _ in rows) for rows in steps]
    q_THW = random_tensor(max(tokens), problem.heads, problem.width, **new)
    blocks = max(count for _, count in plans)
    kv = random_cache((blocks, block, problem.width), problem.rank, problem.quantized, **new)
    kv[0] = -1 if problem.quantized else float("nan")
    arguments, *further = (
        (q_THW[:count], kv, plan) for count, (plan, _) in zip(tokens, plans, strict=True)
    )
    return Sample(problem=problem, weights=(), arguments=arguments, further=tuple(further))


OP: Op[LatentAttentionProblem] = Op(
    name="latent_attention",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.latent_attention.native:KERNEL",
        "headrace.back.kernels.latent_attention.native:WHOLE",
        "headrace.back.kernels.latent_attention.triton_hopper:KERNEL",
        "headrace.back.kernels.latent_attention.triton_latent:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
