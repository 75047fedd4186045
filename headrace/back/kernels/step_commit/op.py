"""Where a step's sampled tokens go: into the rows, to feed the next step, and into the ring the
host reads.

`bind(problem)` returns `f(words, token_R, value_R, tables, ring_SXW) -> None`. token_R int64 and
value_R float32 are what op `greedy` returns. The token of a row whose `sample` word is set becomes
the row's token at position kv_len; slot `words[SLOT]` of the ring takes all R tokens (part 0) and
the bits of their values (part 1), so that the host can read one slot while later steps fill others.
Where the tables have lengths, kv_len is what op `step_inputs` makes of the message's bound, and the
length of a sampled row becomes one more. The words and tables are those of op `step_inputs`; ring
int32 [slots, 2, W], W >= R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.back.kernels.op import Kernel, Op, Sample
from headrace.back.kernels.step_inputs.op import HEADER, SLOT, StepInputsProblem, StepTables

StepCommit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepTables, torch.Tensor], None]


def bind_reference(problem: StepInputsProblem) -> StepCommit:
    """The reference."""
    size = problem.section

    def step_commit(
        words: torch.Tensor,
        token_R: torch.Tensor,
        value_R: torch.Tensor,
        tables: StepTables,
        ring_SXW: torch.Tensor,
    ) -> None:
        tokens_MC, count = tables.tokens_MC, token_R.shape[0]
        row_R, position_R, start_R1, sample_R = (
            words[HEADER + i * size :][: count + (i == 2)].long() for i in range(4)
        )
        nobody = problem.max_rows
        if tables.length_M is not None:
            num_R = start_R1[1:] - start_R1[:-1]
            first_R = torch.minimum(position_R - num_R, tables.length_M[row_R].long() - 1)
            position_R = torch.where(num_R > 0, first_R + num_R, 0)
            sampled_R = torch.where(sample_R > 0, row_R, nobody)
            tables.length_M.index_copy_(0, sampled_R, (position_R + 1).to(torch.int32))
        token_R = token_R.to(torch.int32)
        columns = tokens_MC.shape[1]
        at_R = torch.where(sample_R > 0, row_R * columns + position_R, nobody * columns)
        tokens_MC.view(-1).index_copy_(0, at_R, token_R)
        slot = ring_SXW.index_select(0, words[SLOT : SLOT + 1].long())
        slot[0, 0, :count], slot[0, 1, :count] = token_R, value_R.view(torch.int32)
        ring_SXW.index_copy_(0, words[SLOT : SLOT + 1].long(), slot)

    return step_commit


def _sample(problem: StepInputsProblem) -> Sample:
    """Two decodes and a chunk that is not sampled, in a bucket of five rows."""
    device = problem.device
    problem = replace(problem, max_rows=9)
    words = torch.zeros(problem.updates_at, dtype=torch.int32)
    words[SLOT] = 2
    for i, values in (
        (0, [4, 0, 7, 9, 9]),
        (1, [1, 18, 30, 0, 0]),
        (2, [0, 1, 2, 6, 6, 6]),
        (3, [1, 1, 0, 0, 0]),
    ):
        words[HEADER + i * problem.section :][: len(values)] = torch.tensor(values)
    token = torch.tensor([5, 6, 7, 8, 9], device=device)
    value = torch.tensor([1.5, -2.0, 3.0, 0.0, 0.5], device=device)
    length_M = torch.full((10,), 40, dtype=torch.int32)
    length_M[0] = 16
    tables = StepTables(
        tokens_MC=torch.zeros((10, 40), dtype=torch.int32, device=device),
        blocks_GMB=torch.zeros((1, 10, 3), dtype=torch.int32, device=device),
        length_M=length_M.to(device) if problem.speculates else None,
    )
    ring = torch.zeros((3, 2, 12), dtype=torch.int32, device=device)
    return Sample(
        problem=problem, weights=(), arguments=(words.to(device), token, value, tables, ring)
    )


def outputs(sample: Sample) -> list[torch.Tensor]:
    """The real rows' tokens and lengths, and the ring."""
    _, _, _, tables, ring_SXW = sample.arguments
    rows = sample.problem.max_rows
    lengths = () if tables.length_M is None else (tables.length_M[:rows],)
    return [tables.tokens_MC[:rows], ring_SXW, *lengths]


OP: Op[StepInputsProblem] = Op(
    name="step_commit",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.step_commit.triton_commit:KERNEL",
        "headrace.back.kernels.step_inputs.native:COMMIT",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)
