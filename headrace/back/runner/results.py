"""From what the sampler left on the device to the step's result: one copy to the host, as numpy arrays (ENG-07)."""

from __future__ import annotations

import numpy as np

from headrace.back.runner.batch import StepShape
from headrace.back.sampling.sampler import Sampled
from headrace.base.errors import to_wire
from headrace.base.wire.step import RowLogprobs, StepPlan, StepResult


def to_result(plan: StepPlan, shape: StepShape, sampled: Sampled | None) -> StepResult:
    """The result of one step; indices of sampled rows become indices into plan.rows."""
    tokens = np.full(plan.rows.size, -1, np.int32)
    if sampled is None:
        return StepResult(step=plan.step, tokens=tokens)
    tokens[shape.sampled] = sampled.token_N.cpu().numpy()
    failed = [(int(shape.sampled[i]), to_wire(error)) for i, error in sampled.failed.items()]
    for index, _ in failed:
        tokens[index] = -1
    return StepResult(
        step=plan.step,
        tokens=tokens,
        logprobs=[
            RowLogprobs(int(shape.sampled[row.index]), row.ids, row.values, row.rank)
            for row in sampled.logprobs
        ],
        failed=failed,
    )
