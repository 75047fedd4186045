"""Attention over a window of latents and over the entries of groups of positions, in one softmax
(DeepSeek V4, sections 2.3.1 and 2.3.2).

`bind(problem, sinks_H)` returns `f(q_THD, kv, plan, position_T, entries, entry_plan, groups_TK) ->
out_THD`. T query tokens, H heads that all read one latent of D `head_dim` for each position, as key
and as value; kv [num_blocks, block_tokens, D], the step's own already written. A query at position
p reads positions p - window + 1 .. p and, with a `group` G > 0, entries [num_blocks, places, D]
(kernels/group_write) of the groups groups_TK, int32, -1 in place of none, or, where top_k is 0 and
groups_TK is not looked at, of all (p + 1) // G complete ones. A head's own score (float32 [H])
takes part in its softmax, and in nothing else:

    scores = scale * q . latent        out = softmax(scores) . latent

Sums are float32. What is given for padding is undefined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.attention.op import Plan, sample_plan
from headrace.back.kernels.group_select.op import entry_places
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.sparse_attention.op import GATHERED, row_of_tokens


class CompressedAttention(Protocol):
    """See the top of the file."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        position_T: torch.Tensor,
        entries: torch.Tensor,
        entry_plan: Plan,
        groups_TK: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CompressedProblem:
    """`dtype` is that of q, the caches and the output; `heads` this rank's; `group` 0: there are no
    entries."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int
    window: int
    group: int
    top_k: int
    block_tokens: int
    scale: float


def bind_reference(problem: CompressedProblem, sinks_H: torch.Tensor) -> CompressedAttention:
    """The reference: gathers what some queries read at a time; safe in graphs."""
    window, group, block_tokens = problem.window, problem.group, problem.block_tokens

    def groups_of(groups_TK: torch.Tensor, position_T: torch.Tensor, plan: Plan) -> torch.Tensor:
        if problem.top_k:
            return groups_TK.long()
        all_K = torch.arange(plan.max_kv_len // group, device=position_T.device)
        return all_K.masked_fill(all_K >= (position_T[:, None] + 1) // group, -1)

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        position_T: torch.Tensor,
        entries: torch.Tensor,
        entry_plan: Plan,
        groups_TK: torch.Tensor,
    ) -> torch.Tensor:
        row_T, back_W = row_of_tokens(plan, len(q_THD)), torch.arange(window, device=kv.device)
        read = window + (problem.top_k or (plan.max_kv_len // group if group else 0))
        most = max(1, GATHERED // (read * problem.head_dim))
        out_THD = torch.empty_like(q_THD)
        for first in range(0, len(q_THD), most):
            part = slice(first, first + most)
            at_CW = position_T[part, None] - (window - 1) + back_W
            absent_CS, at_CW = at_CW < 0, at_CW.clamp(min=0)
            block_CW = plan.block_table_RB[row_T[part, None], at_CW // block_tokens].long()
            latent_CSD = kv[block_CW, at_CW % block_tokens]
            if group:
                groups_CK = groups_of(groups_TK[part], position_T[part], entry_plan)
                column_CK, place_CK = entry_places(groups_CK.clamp(min=0), group, block_tokens)
                block_CK = entry_plan.block_table_RB[row_T[part, None], column_CK].long()
                latent_CSD = torch.cat((latent_CSD, entries[block_CK, place_CK]), dim=1)
                absent_CS = torch.cat((absent_CS, groups_CK < 0), dim=1)
            wide_CSD = latent_CSD.float().masked_fill(absent_CS[:, :, None], 0.0)
            scores_CHS = torch.bmm(q_THD[part].float(), wide_CSD.transpose(1, 2)) * problem.scale
            scores_CHS = scores_CHS.masked_fill(absent_CS[:, None], float("-inf"))
            sinks_CH1 = sinks_H.expand(len(scores_CHS), -1)[:, :, None]
            share_CHS = torch.cat((scores_CHS, sinks_CH1), dim=2).softmax(2)[..., :-1]
            out_THD[part] = torch.bmm(share_CHS, wide_CSD).to(out_THD.dtype)
        return out_THD

    return attention


def _sample(problem: CompressedProblem) -> Sample:
    """Decodes and prompts beside each other."""
    block = problem.block_tokens
    rows = [(1, 1), (1, block + 3), (1, 600), (3, 3), (20, 20 + block)]
    plan, count = sample_plan(rows, block_tokens=block, window=None, device=problem.device)
    position_T = torch.cat([torch.arange(length - n, length) for n, length in rows])
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    q = random_tensor(len(position_T), problem.heads, problem.head_dim, **new)
    kv = random_tensor(count, block, problem.head_dim, **new)
    places = max(1, block // problem.group) if problem.group else 1
    entries = random_tensor(count, places, problem.head_dim, **new)
    kv[0] = entries[0] = float("nan")
    seen_T1 = (position_T[:, None] + 1) // max(1, problem.group)
    groups = torch.arange(problem.top_k).expand(len(position_T), -1)
    groups = groups.masked_fill(groups >= seen_T1, -1).int().to(problem.device)
    sinks = random_tensor(problem.heads, **{**new, "dtype": torch.float32})
    arguments = (q, kv, plan, position_T.to(problem.device), entries, plan, groups)
    return Sample(problem=problem, weights=(sinks,), arguments=arguments)


OP: Op[CompressedProblem] = Op(
    name="compressed_attention",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.compressed_attention.native:KERNEL",
        "headrace.back.kernels.compressed_attention.triton_compressed_attention:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
