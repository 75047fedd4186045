"""Attention of queries with many heads over chosen positions of a cache of keys and values:
kernels/attention of which each query sees a list (MiniMax-M3, Qwen 4).

`bind(problem)` returns `f(q_THD, kv, plan, chosen_TGS) -> out_THD`. T query tokens, H query heads,
K KV heads, D `head_dim`; kv [num_blocks, 2, K, block_tokens, D] (0 = keys, 1 = values), the step's
own already written. chosen_TGS, int32, G = K lists of `top_k` = S positions for each token, one for
the queries of each KV head, or G = 1 for all of them: in rising order, none behind the query's own,
-1 behind the last of them. Nothing else is read:

    scores = scale * q . key[chosen]        out = softmax(scores) . value[chosen]

What is given for padding, or a list without positions, is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.attention.op import Plan, sample_plan
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.sparse_latent_attention.op import sample_choice

GATHERED = 1 << 26
"""Elements of keys that are gathered at once, at most: queries are taken in chunks."""


class SparseAttentionFunction(Protocol):
    """See the top of the file."""

    def __call__(
        self, q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TGS: torch.Tensor, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SparseAttentionProblem:
    """`dtype` is that of q, the cache and the output; `lists`: G."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    lists: int
    top_k: int
    block_tokens: int
    scale: float


def row_of_tokens(plan: Plan, count: int) -> torch.Tensor:
    """The row of each of `count` tokens, int64; that of padding is any."""
    starts_R = plan.query_start_R1[1:].contiguous()
    tokens_T = torch.arange(count, device=starts_R.device, dtype=starts_R.dtype)
    row_T = torch.searchsorted(starts_R, tokens_T, right=True)
    return row_T.clamp_(max=starts_R.shape[0] - 1)


def bind_reference(problem: SparseAttentionProblem) -> SparseAttentionFunction:
    """The reference: gathers the keys and values of some queries at a time; safe in graphs."""
    assert problem.lists in (1, problem.kv_heads), problem
    block_tokens, kv_heads = problem.block_tokens, problem.kv_heads
    most = max(1, GATHERED // (kv_heads * problem.top_k * problem.head_dim))

    def attention(
        q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TGS: torch.Tensor
    ) -> torch.Tensor:
        row_T = row_of_tokens(plan, len(q_THD))
        head_K1 = torch.arange(kv_heads, device=kv.device)[:, None]
        out_THD = torch.empty_like(q_THD)
        for first in range(0, len(q_THD), most):
            part = slice(first, first + most)
            at_CGS = chosen_TGS[part].long().clamp_(min=0)
            block_CGS = plan.block_table_RB[row_T[part][:, None, None], at_CGS // block_tokens]
            both_CKS2D = kv[block_CGS.long(), :, head_K1, at_CGS % block_tokens].float()
            q_CKGD = q_THD[part].float().unflatten(1, (kv_heads, -1))
            scores_CKGS = torch.einsum("ckgd,cksd->ckgs", q_CKGD, both_CKS2D[..., 0, :])
            hidden_CG1S = (chosen_TGS[part] < 0)[:, :, None]
            scores_CKGS = (scores_CKGS * problem.scale).masked_fill(hidden_CG1S, float("-inf"))
            share_CKGS = scores_CKGS.softmax(-1).nan_to_num(0.0)
            values_CKSD = both_CKS2D[..., 1, :].masked_fill(hidden_CG1S.transpose(2, 3), 0.0)
            y_CKGD = torch.einsum("ckgs,cksd->ckgd", share_CKGS, values_CKSD)
            out_THD[part] = y_CKGD.flatten(1, 2).to(out_THD.dtype)
        return out_THD

    return attention


def _sample(problem: SparseAttentionProblem) -> Sample:
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
    chosen = [
        torch.stack(
            [sample_choice(rows, problem.top_k, generator) for _ in range(problem.lists)], dim=1
        ).to(problem.device)
        for rows in steps
    ]
    q_THD = random_tensor(max(map(len, chosen)), problem.heads, problem.head_dim, **new)
    shape = (2, problem.kv_heads, block, problem.head_dim)
    kv = random_tensor(max(count for _, count in plans), *shape, **new)
    kv[0] = float("nan")
    arguments, *further = (
        (q_THD[: len(chosen_TGS)], kv, plan, chosen_TGS)
        for chosen_TGS, (plan, _) in zip(chosen, plans, strict=True)
    )
    return Sample(problem=problem, weights=(), arguments=arguments, further=tuple(further))


OP: Op[SparseAttentionProblem] = Op(
    name="sparse_attention",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.sparse_attention.native:KERNEL",
        "headrace.back.kernels.sparse_attention.triton_sparse_attention:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
