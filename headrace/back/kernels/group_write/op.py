"""The entries of groups of neighbouring positions, made of what is cached of their tokens as soon
as the last of them is there (GLM-5, Qwen 4, DeepSeek V4).

`bind(problem, bias_GX, weight_I)` returns `f(tokens, entries, table_PR, plan, entry_plan) -> None`.
I `width`, X = `series` * I, G `group`. tokens [num_blocks, block_tokens, Z]: of each token its
values [X], and, with `gated`, their gates [X]; entries [num_blocks, places, I], where the entry of
a group lies in the block of the group's last position, or has one to itself where groups are
larger; each cache has a plan of its own (kernels/attention). Every group whose last token is of
this step gets its entry:

    entry = mean of values                                       without gates
    entry = sum over s in g of softmax over s (gate[s] + bias[s - first]) * value[s]      with them

With two `series` the softmax is over the values of the first of the group before, if there is one,
and of the second of this. Then, if there is a weight, the root mean square norm with it (`eps`),
and, with `rotary` R > 0, the rotation of R elements from `offset` on at the group's first position
(`layout` as in kernels/rope). Sums are float32; bias and weight are float32 or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from headrace.back.kernels.rope.op import RopeProblem
from headrace.back.kernels.rope.op import bind_reference as bind_rope

GroupWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Plan, Plan], None]


@dataclass(frozen=True, kw_only=True)
class GroupWriteProblem:
    """`dtype` is that of both caches. A group divides a block or is whole blocks. `eps`: None if
    there is no norm."""

    device: str
    dtype: torch.dtype
    width: int
    group: int
    block_tokens: int
    series: int = 1
    gated: bool = False
    eps: float | None = None
    rotary: int = 0
    offset: int = 0
    layout: str = "half"

    @property
    def token_width(self) -> int:
        """Z."""
        return self.series * self.width * (1 + self.gated)


def bind_reference(
    problem: GroupWriteProblem, bias_GX: torch.Tensor | None, weight_I: torch.Tensor | None
) -> GroupWrite:
    """The reference: a row at a time."""
    assert (weight_I is not None) == (problem.eps is not None), problem
    facts = {"device": problem.device, "dtype": torch.float32, "layout": problem.layout}
    rotate = bind_rope(RopeProblem(**facts, head_dim=problem.rotary, rotary_dim=problem.rotary))
    rotated = slice(problem.offset, problem.offset + problem.rotary)

    def group_write(
        tokens: torch.Tensor,
        entries: torch.Tensor,
        table_PR: torch.Tensor,
        plan: Plan,
        entry_plan: Plan,
    ) -> None:
        for row, length in enumerate(plan.host_kv_len.tolist()):
            begin, end = plan.host_query_start[row : row + 2].tolist()
            first, behind = (length - (end - begin)) // problem.group, length // problem.group
            if first == behind:
                continue
            groups_S = torch.arange(first, behind, device=tokens.device)
            entry_SI = _pooled(problem, bias_GX, tokens, plan.block_table_RB[row], groups_S)
            if problem.eps is not None:
                square_S1 = entry_SI.square().mean(1, keepdim=True)
                entry_SI = entry_SI * torch.rsqrt(square_S1 + problem.eps) * weight_I
            if problem.rotary:
                turned_S1R = entry_SI[:, None, rotated]
                rotate(turned_S1R, turned_S1R[:, :0], groups_S * problem.group, table_PR)
            column_S, place_S = entry_places(groups_S, problem.group, problem.block_tokens)
            block_S = entry_plan.block_table_RB[row, column_S].long()
            entries[block_S, place_S] = entry_SI.to(entries.dtype)

    return group_write


def _pooled(
    problem: GroupWriteProblem,
    bias_GX: torch.Tensor | None,
    tokens: torch.Tensor,
    table_B: torch.Tensor,
    groups_S: torch.Tensor,
) -> torch.Tensor:
    group, width = problem.group, problem.width
    at_SG = groups_S[:, None] * group + torch.arange(group, device=tokens.device)
    token_SGZ = _tokens_at(problem, tokens, table_B, at_SG)
    if not problem.gated:
        return token_SGZ.mean(1)
    value_SGX, gate_SGX = token_SGZ.chunk(2, dim=2)
    gate_SGX = gate_SGX + bias_GX
    if problem.series == 2:
        before_SG = at_SG - group
        none_S11 = (before_SG[:, :1] < 0)[:, :, None]
        own_SGZ = _tokens_at(problem, tokens, table_B, before_SG.clamp(min=0))
        former_SGX, former_gate_SGX = own_SGZ.chunk(2, dim=2)
        former_gate_SGX = (former_gate_SGX + bias_GX).masked_fill(none_S11, float("-inf"))
        former_SGX = former_SGX.masked_fill(none_S11, 0.0)
        value_SGX = torch.cat((former_SGX[..., :width], value_SGX[..., width:]), dim=1)
        gate_SGX = torch.cat((former_gate_SGX[..., :width], gate_SGX[..., width:]), dim=1)
    return (gate_SGX.softmax(1) * value_SGX).sum(1)


def _tokens_at(
    problem: GroupWriteProblem, tokens: torch.Tensor, table_B: torch.Tensor, at_SG: torch.Tensor
) -> torch.Tensor:
    block_SG = table_B[at_SG // problem.block_tokens].long()
    return tokens[block_SG, at_SG % problem.block_tokens].float()


def _sample(problem: GroupWriteProblem) -> Sample:
    block, group = problem.block_tokens, problem.group
    rows = [(1, 1), (1, 2 * group), (1, 600), (3, 3), (2 * group + 3, 3 * group + 1)]
    plan, count = sample_plan(rows, block_tokens=block, window=None, device=problem.device)
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    wide = {**new, "dtype": torch.float32}
    tokens = random_tensor(count, block, problem.token_width, **new)
    tokens[0] = float("nan")
    entries = random_tensor(count, max(1, block // group), problem.width, **new)
    angles = 3 * torch.rand(610, problem.rotary // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(problem.device)
    bias = random_tensor(group, problem.series * problem.width, **wide)
    weight = random_tensor(problem.width, **wide)
    return Sample(
        problem=problem,
        weights=(bias if problem.gated else None, None if problem.eps is None else weight),
        arguments=(tokens, entries, table, plan, plan),
    )


OP: Op[GroupWriteProblem] = Op(
    name="group_write",
    reference=Kernel(
        name="torch",
        supports=lambda problem: None,
        bind=bind_reference,
        reads_host=True,
        invariant=True,
    ),
    kernels=(
        "headrace.back.kernels.group_write.native:KERNEL",
        "headrace.back.kernels.group_write.triton_group_write:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
