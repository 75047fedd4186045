"""From what the sampler left on the device to the step's result: one copy to the host, as numpy arrays (ENG-07)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from headrace.back.runner.batch import StepShape
from headrace.back.sampling.sampler import Sampled
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.request import Pooled, PromptLogprobs
from headrace.base.wire.step import RowLogprobs, StepPlan, StepResult


def to_result(
    plan: StepPlan,
    shape: StepShape,
    sampled: Sampled | None,
    prompts: list[tuple[int, PromptLogprobs]],
    pooled: list[tuple[int, Pooled]],
    refused: Mapping[int, HeadraceError] = MappingProxyType({}),
) -> StepResult:
    """The result of one step; indices of sampled rows become indices into plan.rows, as those of `refused` are."""
    tokens = np.full(plan.rows.size, -1, np.int32)
    failed = dict(refused)
    logprobs: list[RowLogprobs] = []
    if sampled is not None:
        index_N = shape.sampled
        tokens[index_N] = sampled.token_N.cpu().numpy()
        failed |= {int(index_N[i]): error for i, error in sampled.failed.items()}
        tokens[list(failed)] = -1
        logprobs = [
            RowLogprobs(int(index_N[row.index]), row.ids, row.values, row.rank)
            for row in sampled.logprobs
        ]
    errors = [(index, to_wire(error)) for index, error in failed.items()]
    return StepResult(
        step=plan.step,
        tokens=tokens,
        logprobs=logprobs,
        prompt_logprobs=prompts,
        pooled=pooled,
        failed=errors,
    )
