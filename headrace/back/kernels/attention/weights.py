"""The weights of attention, for people who look into a model: what a kernel never writes down,
worked out once more.

In float32, whatever the model's type. Shapes: Q queries of a row, H query heads, K KV heads, G =
H/K, S positions with KV, D head_dim.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import AttentionProblem, Plan
from headrace.back.kernels.attention.reference import bias_of, dequantized, scores_of


def attention_weights(
    problem: AttentionProblem, q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, row: int
) -> torch.Tensor:
    """softmax(q k^T scale) of one row's queries over every position, [Q, H, S]; 0 where a query
    does not look. `kv` holds this step's keys already; the plan has host copies."""
    assert not problem.sinks, "no model with sinks has an attention probe yet"
    if problem.quantized:
        kv, plan = dequantized(problem, kv, plan)
    assert plan.host_query_start is not None and plan.host_kv_len is not None
    begin, end = int(plan.host_query_start[row]), int(plan.host_query_start[row + 1])
    kv_len = int(plan.host_kv_len[row])
    blocks = plan.block_table_RB[row, : -(-kv_len // problem.block_tokens)].long()
    k_KSD = kv[:, 0][blocks].transpose(0, 1).flatten(1, 2)[:, :kv_len].float()
    q_KGQD = q_THD[begin:end].unflatten(1, (problem.kv_heads, -1)).permute(1, 2, 0, 3).float()
    query_Q1 = torch.arange(kv_len - (end - begin), kv_len, device=kv.device)[:, None]
    key_S = torch.arange(kv_len, device=kv.device)
    seen_QS = key_S <= query_Q1 if problem.causal else torch.ones_like(key_S <= query_Q1)
    if problem.window is not None:
        seen_QS &= key_S > query_Q1 - problem.window
    if problem.chunk is not None:
        seen_QS &= key_S >= query_Q1 // problem.chunk * problem.chunk
    scores = scores_of(problem, q_KGQD, k_KSD[:, None])
    if problem.slopes:
        scores += bias_of(problem, key_S - query_Q1, (problem.kv_heads, -1, 1, 1))
    scores = scores.masked_fill_(~seen_QS, float("-inf"))
    return scores.softmax(-1).flatten(0, 1).transpose(0, 1)
