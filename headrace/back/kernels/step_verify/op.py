"""Which drafts stand: compares what each query token of a step has sampled with the draft behind
it.

A row of n query tokens in such a step is its newest token, at position `first`, and n - 1 tokens
that a drafter has put behind it, of which the first `count` were proposed. All n are sampled, each
as if the drafts before it were the row's own tokens. A draft stands while it equals the sample in
its place; the samples up to and with the first that differs are exactly what one token a step would
have given, since the noise of a sample depends on its position alone.

`bind(problem)` returns `f(words, token_T, value_T, tables, count_M, ring_SXW) -> None`. token_T
int64 and value_T float32 are of each query token; count_M int32 [M+1]. Accepted samples become the
row's tokens from first + 1 on, its length ends behind them. Slot `words[SLOT]` of the ring takes
the tokens (part 0): REJECTED in place of a sample behind a proposed draft that does not stand,
UNDRAFTED behind what was not proposed and in padding; and the bits of the values (part 1). The
words, the tables, which have lengths, and `first` are those of op `step_inputs`; ring int32 [slots,
2, W], W >= T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.back.kernels.op import Kernel, Op, Sample
from headrace.back.kernels.step_inputs.op import (
    HEADER,
    ROWS,
    SLOT,
    StepInputsProblem,
    StepTables,
)

UNDRAFTED, REJECTED = -1, -2

StepVerify = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, StepTables, torch.Tensor, torch.Tensor], None
]


def bind_reference(problem: StepInputsProblem) -> StepVerify:
    """The reference, a row at a time."""
    size = problem.section

    def step_verify(
        words: torch.Tensor,
        token_T: torch.Tensor,
        value_T: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        ring_SXW: torch.Tensor,
    ) -> None:
        assert tables.length_M is not None
        num_tokens, slot = token_T.shape[0], int(words[SLOT])
        row_R, kv_len_R, start_R1, _ = (
            words[HEADER + i * size :][:size].tolist() for i in range(4)
        )
        accepted_T = torch.full((num_tokens,), UNDRAFTED, dtype=torch.int32, device=words.device)
        for r in range(int(words[ROWS])):
            row, start, num = row_R[r], start_R1[r], start_R1[r + 1] - start_R1[r]
            first = min(kv_len_R[r] - num, int(tables.length_M[row]) - 1)
            proposed = min(int(count_M[row]), num - 1)
            drafts = tables.tokens_MC[row, first + 1 : first + num].tolist()
            samples = token_T[start : start + num].tolist()
            accepted = 1
            while accepted <= proposed and drafts[accepted - 1] == samples[accepted - 1]:
                accepted += 1
            kept = torch.tensor(samples[:accepted], dtype=torch.int32, device=words.device)
            tables.tokens_MC[row, first + 1 : first + 1 + accepted] = kept
            tables.length_M[row] = first + 1 + accepted
            accepted_T[start : start + accepted] = kept
            accepted_T[start + accepted : start + 1 + proposed] = REJECTED
        ring_SXW[slot, 0, :num_tokens] = accepted_T
        ring_SXW[slot, 1, :num_tokens] = value_T.view(torch.int32)

    return step_verify


def _sample(problem: StepInputsProblem) -> Sample:
    """Rows of 4, 1, 3 and 3 query tokens: one whose second draft fails, one without drafts, one
    with fewer proposed than there is room for, one whose drafts all stand; padding."""
    device = problem.device
    problem = replace(problem, max_rows=9, speculates=True)
    words = torch.zeros(problem.updates_at, dtype=torch.int32)
    words[ROWS], words[1], words[SLOT] = 4, 11, 2
    for i, values in (
        (0, [4, 0, 7, 2, 9, 9]),
        (1, [24, 18, 13, 9, 0, 0]),
        (2, [0, 4, 5, 8, 11, 11, 11]),
        (3, [1, 1, 1, 1, 0, 0]),
    ):
        words[HEADER + i * problem.section :][: len(values)] = torch.tensor(values)
    length_M = torch.tensor([18, 1, 7, 9, 19, 1, 1, 11, 1, 1], dtype=torch.int32)
    count_M = torch.tensor([3, 0, 2, 0, 3, 0, 0, 1, 0, 0], dtype=torch.int32)
    tokens_MC = torch.arange(400, dtype=torch.int32).view(10, 40)
    token = torch.tensor([179, 5, 181, 6, 11, 291, 292, 7, 87, 88, 89, 1, 2])
    value = torch.linspace(-1.0, 1.0, 13)
    tables = StepTables(
        tokens_MC=tokens_MC.to(device),
        blocks_GMB=torch.zeros((1, 10, 3), dtype=torch.int32, device=device),
        length_M=length_M.to(device),
    )
    ring = torch.zeros((3, 2, 16), dtype=torch.int32, device=device)
    arguments = (words, token, value)
    return Sample(
        problem=problem,
        weights=(),
        arguments=(*(t.to(device) for t in arguments), tables, count_M.to(device), ring),
    )


def outputs(sample: Sample) -> list[torch.Tensor]:
    """The real rows' tokens and lengths, and the ring."""
    _, _, _, tables, _, ring_SXW = sample.arguments
    rows = sample.problem.max_rows
    return [tables.tokens_MC[:rows], tables.length_M[:rows], ring_SXW]


OP: Op[StepInputsProblem] = Op(
    name="step_verify",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.step_verify.triton_verify:KERNEL",
        "headrace.back.kernels.step_inputs.native:VERIFY",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)
