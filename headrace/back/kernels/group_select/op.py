"""Which groups of neighbouring positions a query of sparse attention reads: position s belongs to
group s // `group`.

`bind(problem)` returns `f(q_TJI, weight_TJ, entries, plan) -> chosen_TGK`, int32. T query tokens, J
heads of the indexer, I `dim`, K `top_k`; scores are float32. Two ways to score a group:

of its entry (`best_key` False): each complete group has one, entries [num_blocks, E, I], which lies
as kernels/group_write says. A query at position p chooses among the (p + 1) // group complete ones,
G = 1 list for all heads:

    score[g] = sum over j of weight[j] * relu(q[j] . entry[g])

of its best key (`best_key`): entries [num_blocks, block_tokens, I] are keys of positions, all up to
p are seen; G = J, a list for each head, and the last `local` groups up to that of p are always in
it; weights are not looked at (MiniMax-M3):

    score[j, g] = max over s in g, s <= p, of q[j] . key[s]

Among equal scores the lower groups are chosen. Chosen groups come in rising order, -1 behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.back.kernels.attention.op import Plan, sample_plan
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

NOTHING = -1
"""In place of a group."""


class GroupSelect(Protocol):
    """See the top of the file."""

    def __call__(
        self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, entries: torch.Tensor, plan: Plan, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class GroupSelectProblem:
    """`dtype` is that of the queries, the weights and the entries. A group divides a block or is
    whole blocks."""

    device: str
    dtype: torch.dtype
    heads: int
    dim: int
    group: int
    top_k: int
    block_tokens: int
    best_key: bool = False
    local: int = 0

    @property
    def lists(self) -> int:
        """G."""
        return self.heads if self.best_key else 1


def entry_places(groups_S: torch.Tensor, group: int, block_tokens: int) -> tuple[torch.Tensor, ...]:
    """Where the entries of groups lie: the column of the block table, and the place in the block.
    Entries of groups larger than a block have a block each."""
    size, last_S = max(block_tokens, group), (groups_S + 1) * group - 1
    return last_S // size, last_S % size // group


def bind_reference(problem: GroupSelectProblem) -> GroupSelect:
    """The reference: a row at a time, and all of its scores sorted."""
    score = _of_best_keys if problem.best_key else _of_entries

    def group_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, entries: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        shape = (q_TJI.shape[0], problem.lists, problem.top_k)
        chosen_TGK = torch.full(shape, NOTHING, dtype=torch.int32, device=q_TJI.device)
        for row, length in enumerate(plan.host_kv_len.tolist()):
            begin, end = plan.host_query_start[row : row + 2].tolist()
            if begin == end:
                continue
            position_Q = torch.arange(length - (end - begin), length, device=q_TJI.device)
            q_QJI, weight_QJ = q_TJI[begin:end].float(), weight_TJ[begin:end].float()
            table_B = plan.block_table_RB[row]
            score_QGS = score(problem, q_QJI, weight_QJ, entries, table_B, position_Q)
            best_QGK = _best(score_QGS, problem.top_k)
            chosen_TGK[begin:end, :, : best_QGK.shape[2]] = best_QGK
        return chosen_TGK

    return group_select


def _of_entries(
    problem: GroupSelectProblem,
    q_QJI: torch.Tensor,
    weight_QJ: torch.Tensor,
    entries: torch.Tensor,
    table_B: torch.Tensor,
    position_Q: torch.Tensor,
) -> torch.Tensor:
    seen_Q = (position_Q + 1) // problem.group
    groups_S = torch.arange(int(seen_Q[-1]), device=q_QJI.device)
    column_S, place_S = entry_places(groups_S, problem.group, problem.block_tokens)
    entry_SI = entries[table_B[column_S].long(), place_S].float()
    score_QS = q_QJI.new_zeros((len(q_QJI), len(groups_S)))
    for head in range(problem.heads):
        score_QS += weight_QJ[:, head, None] * (q_QJI[:, head] @ entry_SI.T).relu_()
    return score_QS.masked_fill(groups_S >= seen_Q[:, None], float("-inf"))[:, None]


def _of_best_keys(
    problem: GroupSelectProblem,
    q_QJI: torch.Tensor,
    weight_QJ: torch.Tensor,
    entries: torch.Tensor,
    table_B: torch.Tensor,
    position_Q: torch.Tensor,
) -> torch.Tensor:
    length, group = int(position_Q[-1]) + 1, problem.group
    blocks = table_B[: -(-length // problem.block_tokens)].long()
    key_SI = entries[blocks].flatten(0, 1)[:length].float()
    score_QJS = torch.einsum("qji,si->qjs", q_QJI, key_SI)
    behind_QS = torch.arange(length, device=q_QJI.device) > position_Q[:, None]
    score_QJS = score_QJS.masked_fill(behind_QS[:, None], float("-inf"))
    score_QJS = F.pad(score_QJS, (0, -length % group), value=float("-inf"))
    score_QJS = score_QJS.unflatten(2, (-1, group)).amax(-1)
    behind_QS = (position_Q // group)[:, None] - torch.arange(score_QJS.shape[2]).to(q_QJI.device)
    local_QS = (behind_QS >= 0) & (behind_QS < problem.local)
    return score_QJS.masked_fill(local_QS[:, None], float("inf"))


def _best(score_QGS: torch.Tensor, top_k: int) -> torch.Tensor:
    """best_QGK, int32: see the top of the file; those of -Inf are none."""
    count = score_QGS.shape[2]
    order_QGS = score_QGS.sort(dim=2, descending=True, stable=True)
    best_QGK = order_QGS.indices[..., :top_k]
    best_QGK = best_QGK.masked_fill(order_QGS.values[..., :top_k] == float("-inf"), count)
    best_QGK = best_QGK.sort(dim=2).values
    return best_QGK.masked_fill(best_QGK == count, NOTHING).int()


def _sample(problem: GroupSelectProblem) -> Sample:
    """Decodes and prompts beside each other. Small whole numbers, so that a score has the same bits
    in whatever order it is summed."""
    block = problem.block_tokens
    rows = [(1, 1), (1, block + 3), (1, 600), (3, 3), (20, 20 + block)]
    plan, count = sample_plan(rows, block_tokens=block, window=None, device=problem.device)
    tokens = sum(queries for queries, _ in rows)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    q_TJI = random_tensor(tokens, problem.heads, problem.dim, **new).round_()
    weight_TJ = random_tensor(tokens, problem.heads, **new).round_()
    places = block if problem.best_key else max(1, block // problem.group)
    entries = random_tensor(count, places, problem.dim, **new).round_()
    entries[0] = float("nan")
    return Sample(problem=problem, weights=(), arguments=(q_TJI, weight_TJ, entries, plan))


OP: Op[GroupSelectProblem] = Op(
    name="group_select",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.group_select.native:KERNEL",
        "headrace.back.kernels.group_select.triton_group_select:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)
