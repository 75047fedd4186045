"""Which positions a query of sparse attention reads: the best of an indexer's scores
(DeepSeek-V3.2, "DeepSeek sparse attention", equation 1).

`bind(problem)` returns `f(q_TJI, weight_TJ, keys, plan) -> chosen_TK`, int32. T query tokens, J
heads of the indexer, I `dim`, K `top_k`; keys [num_blocks, block_tokens, I], the step's own already
written; `plan` is that of kernels/attention. A query at position p chooses among 0 .. p:

    score[s] = sum over j of weight[j] * relu(q[j] . key[s])

in float32. Among equal scores the lower positions are chosen. Chosen positions come in rising
order, and -1 behind them where there are fewer than K. What stands in the cache behind p is not
looked at, and rows are independent of each other. Of padding tokens all is -1 where a kernel knows
of them, else undefined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.attention.op import Plan, sample_plan
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

NOTHING = -1
"""In place of a position."""


class IndexSelect(Protocol):
    """See the top of the file."""

    def __call__(
        self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class IndexSelectProblem:
    """`dtype` is that of the queries, the weights and the keys."""

    device: str
    dtype: torch.dtype
    heads: int
    dim: int
    top_k: int
    block_tokens: int


def bind_reference(problem: IndexSelectProblem) -> IndexSelect:
    """The reference: a row at a time, and all of its scores sorted."""

    def index_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        shape = (q_TJI.shape[0], problem.top_k)
        chosen_TK = torch.full(shape, NOTHING, dtype=torch.int32, device=q_TJI.device)
        for row, length in enumerate(plan.host_kv_len.tolist()):
            begin, end = plan.host_query_start[row : row + 2].tolist()
            if begin == end:
                continue
            blocks = plan.block_table_RB[row, : -(-length // problem.block_tokens)].long()
            key_SI = keys[blocks].flatten(0, 1)[:length].float()
            score_QS = _scores(q_TJI[begin:end].float(), weight_TJ[begin:end].float(), key_SI)
            position_Q1 = torch.arange(length - (end - begin), length, device=keys.device)[:, None]
            best_QK = best_positions(score_QS, position_Q1, problem.top_k)
            chosen_TK[begin:end, : best_QK.shape[1]] = best_QK
        return chosen_TK

    return index_select


def _scores(q_QJI: torch.Tensor, weight_QJ: torch.Tensor, key_SI: torch.Tensor) -> torch.Tensor:
    score_QS = q_QJI.new_zeros((q_QJI.shape[0], key_SI.shape[0]))
    for head in range(q_QJI.shape[1]):
        score_QS += weight_QJ[:, head, None] * (q_QJI[:, head] @ key_SI.T).relu_()
    return score_QS


def best_positions(score_QS: torch.Tensor, position_Q1: torch.Tensor, top_k: int) -> torch.Tensor:
    """best_QK, int32, of each query at its position: see the top of the file."""
    length = score_QS.shape[1]
    hidden_QS = torch.arange(length, device=score_QS.device) > position_Q1
    order_QS = score_QS.masked_fill(hidden_QS, float("-inf")).sort(
        dim=1, descending=True, stable=True
    )[1]
    best_QK = order_QS[:, :top_k]
    best_QK = best_QK.masked_fill(best_QK > position_Q1, length).sort(dim=1)[0]
    return best_QK.masked_fill(best_QK == length, NOTHING).int()


Steps = list[list[tuple[int, int]]]


def sample_of(problem: IndexSelectProblem, steps: Steps | None = None) -> Sample:
    """Inputs of these steps of (query tokens, length); None: decodes and prompts beside each other,
    and decodes alone. Small whole numbers, so that a score has the same bits in whatever order it
    is summed."""
    block = problem.block_tokens
    steps = steps or [
        [(1, 1), (1, block + 3), (1, 600), (3, 3), (20, 20 + block)],
        [(1, 600), (1, 1), (1, 2 * block), (1, 700)],
    ]
    plans = [
        sample_plan(rows, block_tokens=block, window=None, device=problem.device) for rows in steps
    ]
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    tokens = [sum(queries for queries, _ in rows) for rows in steps]
    q_TJI = random_tensor(max(tokens), problem.heads, problem.dim, **new).round_()
    weight_TJ = random_tensor(max(tokens), problem.heads, **new).round_()
    keys = random_tensor(max(count for _, count in plans), block, problem.dim, **new).round_()
    keys[0] = float("nan")
    arguments, *further = (
        (q_TJI[:count], weight_TJ[:count], keys, plan)
        for count, (plan, _) in zip(tokens, plans, strict=True)
    )
    return Sample(problem=problem, weights=(), arguments=arguments, further=tuple(further))


OP: Op[IndexSelectProblem] = Op(
    name="index_select",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.index_select.native:KERNEL",
        "headrace.back.kernels.index_select.triton_index_select:KERNEL",
    ),
    sample=sample_of,
    tolerance=lambda problem: 0.0,
)
