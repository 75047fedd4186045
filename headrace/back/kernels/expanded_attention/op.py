"""Attention of rows with several queries over keys and values that were expanded from latents
(multi-head latent attention as DeepSeek-V2, section 2.1, states it, before its products are
absorbed): a third of the operations of the absorbed form, where a row has many queries.

`bind(problem)` returns `f(q_THN, q_THR, key_HSN, rotated_SR, value_HSV, begin_R, plan) -> out_THV`.
T query tokens, H query heads, N `own` dimensions of a key, V `values`, R `rotary` ones, which the
heads share. Keys and values of all positions of a row lie beside each other, from
begin_R[row] (int32) on; queries see positions as in kernels/attention/op.py, whose `Plan` this is:

    scores = scale * (q_n . key[position] + q_r . rotated[position])
    out = softmax(scores) . value[positions]

Rows with fewer than MIN_QUERIES queries, and tokens of no row, are left as `out` is: anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

ExpandedAttention = Callable[..., torch.Tensor]
MIN_QUERIES = 2


@dataclass(frozen=True, kw_only=True)
class ExpandedAttentionProblem:
    """`dtype` is that of queries, keys, values and the output."""

    device: str
    dtype: torch.dtype
    heads: int
    own: int
    values: int
    rotary: int
    scale: float


def bind_reference(problem: ExpandedAttentionProblem) -> ExpandedAttention:
    """The reference: a row at a time, in float32."""

    def attention(
        q_THN: torch.Tensor,
        q_THR: torch.Tensor,
        key_HSN: torch.Tensor,
        rotated_SR: torch.Tensor,
        value_HSV: torch.Tensor,
        begin_R: torch.Tensor,
        plan: object,
    ) -> torch.Tensor:
        out_THV = q_THN.new_zeros((*q_THN.shape[:2], problem.values))
        for row, length in enumerate(plan.host_kv_len.tolist()):
            first, end = plan.host_query_start[row : row + 2].tolist()
            if end - first < MIN_QUERIES:
                continue
            begin = int(begin_R[row])
            at = slice(begin, begin + length)
            q_HQN, q_HQR = (q[first:end].float().transpose(0, 1) for q in (q_THN, q_THR))
            scores_HQS = q_HQN @ key_HSN[:, at].float().transpose(1, 2)
            scores_HQS = (scores_HQS + q_HQR @ rotated_SR[at].float().T) * problem.scale
            position_Q1 = torch.arange(length - (end - first), length, device=begin_R.device)
            hidden_QS = torch.arange(length, device=begin_R.device) > position_Q1[:, None]
            scores_HQS.masked_fill_(hidden_QS, float("-inf"))
            out_HQV = scores_HQS.softmax(dim=-1) @ value_HSV[:, at].float()
            out_THV[first:end] = out_HQV.transpose(0, 1).to(out_THV.dtype)
        return out_THV

    return attention


def _sample(problem: ExpandedAttentionProblem) -> Sample:
    """Rows that are new, rows behind others' positions, of one tile and of more."""
    rows = [(2, 2), (70, 70), (3, 200), (300, 430), (129, 129)]
    plan, _ = sample_plan(rows, block_tokens=16, window=None, device=problem.device)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    begin_R = (lengths.cumsum(0) - lengths).int().to(problem.device)
    tokens, positions = sum(queries for queries, _ in rows), int(lengths.sum())
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    heads, own, rotary = problem.heads, problem.own, problem.rotary
    arguments = (
        random_tensor(tokens, heads, own, **new),
        random_tensor(tokens, heads, rotary, **new),
        random_tensor(heads, positions, own, **new),
        random_tensor(positions, rotary, **new),
        random_tensor(heads, positions, problem.values, **new),
        begin_R,
        plan,
    )
    return Sample(problem=problem, weights=(), arguments=arguments)


OP: Op[ExpandedAttentionProblem] = Op(
    name="expanded_attention",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.expanded_attention.native:KERNEL",
        "headrace.back.kernels.expanded_attention.triton_hopper:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
