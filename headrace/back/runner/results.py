"""From what the sampler left on the device to the step's result: one copy to the host, as numpy arrays (ENG-07)."""

from __future__ import annotations

import numpy as np

from headrace.back.runner.batch import StepShape
from headrace.back.sampling.sampler import Sampled
from headrace.base.errors import WireError, to_wire
from headrace.base.wire.request import PromptLogprobs
from headrace.base.wire.step import RowLogprobs, StepPlan, StepResult


def to_result(
    plan: StepPlan,
    shape: StepShape,
    sampled: Sampled | None,
    prompts: list[tuple[int, PromptLogprobs]],
) -> StepResult:
    """The result of one step; indices of sampled rows become indices into plan.rows."""
    tokens = np.full(plan.rows.size, -1, np.int32)
    failed: list[tuple[int, WireError]] = []
    logprobs: list[RowLogprobs] = []
    if sampled is not None:
        index_N = shape.sampled
        tokens[index_N] = sampled.token_N.cpu().numpy()
        failed = [(int(index_N[i]), to_wire(error)) for i, error in sampled.failed.items()]
        tokens[[index for index, _ in failed]] = -1
        logprobs = [
            RowLogprobs(int(index_N[row.index]), row.ids, row.values, row.rank)
            for row in sampled.logprobs
        ]
    return StepResult(
        step=plan.step, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompts, failed=failed
    )
