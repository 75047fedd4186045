"""Where a step's picked tokens go: into the rows, to feed the next step, and into the ring the host reads.

`bind(problem)` returns `f(words, token_R, value_R, tokens_MC, ring_SRM) -> None`. token_R int64 and value_R float32 are
what op `greedy` returns. The token of a row whose `sample` word is set becomes the row's token at position kv_len; slot
`words[SLOT]` of the ring takes all R tokens (part 0) and the bits of their values (part 1), so that the host can read
one slot while later steps fill others. The words are those of op `step_inputs`; ring int32 [slots, 2, M].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.kernels.op import Kernel, Op, Sample
from headrace.back.kernels.step_inputs.op import HEADER, SLOT, StepInputsProblem

StepCommit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def bind_reference(problem: StepInputsProblem) -> StepCommit:
    """The reference."""
    size = problem.section

    def step_commit(
        words: torch.Tensor,
        token_R: torch.Tensor,
        value_R: torch.Tensor,
        tokens_MC: torch.Tensor,
        ring_SRM: torch.Tensor,
    ) -> None:
        count, columns = token_R.shape[0], tokens_MC.shape[1]
        row_R, position_R, _, sample_R = (
            words[HEADER + i * size :][:count].long() for i in range(4)
        )
        token_R = token_R.to(torch.int32)
        nobody = problem.max_rows * columns
        at_R = torch.where(sample_R > 0, row_R * columns + position_R, nobody)
        tokens_MC.view(-1).index_copy_(0, at_R, token_R)
        slot = ring_SRM.index_select(0, words[SLOT : SLOT + 1].long())
        slot[0, 0, :count], slot[0, 1, :count] = token_R, value_R.view(torch.int32)
        ring_SRM.index_copy_(0, words[SLOT : SLOT + 1].long(), slot)

    return step_commit


def _sample(problem: StepInputsProblem) -> Sample:
    device = problem.device
    problem = StepInputsProblem(device=device, block_tokens=problem.block_tokens, max_rows=9)
    words = torch.zeros(problem.updates_at, dtype=torch.int32)
    words[SLOT] = 2
    for i, values in ((0, [4, 0, 7, 9, 9]), (1, [1, 18, 30, 0, 0]), (3, [1, 1, 0, 0, 0])):
        words[HEADER + i * problem.section :][: len(values)] = torch.tensor(values)
    token = torch.tensor([5, 6, 7, 8, 9], device=device)
    value = torch.tensor([1.5, -2.0, 3.0, 0.0, 0.5], device=device)
    rows = torch.zeros((10, 40), dtype=torch.int32, device=device)
    ring = torch.zeros((3, 2, 9), dtype=torch.int32, device=device)
    return Sample(
        problem=problem, weights=(), arguments=(words.to(device), token, value, rows, ring)
    )


def outputs(sample: Sample) -> list[torch.Tensor]:
    """The real rows' tokens and the ring."""
    _, _, _, tokens_MC, ring_SRM = sample.arguments
    return [tokens_MC[: sample.problem.max_rows], ring_SRM]


OP: Op[StepInputsProblem] = Op(
    name="step_commit",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.step_commit.triton_commit:KERNEL",
        "headrace.back.kernels.step_commit.native:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)
