"""A launched step's result: from what was sampled to what each row has gained, or why it failed."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from headrace.back.kernels.step_verify.op import REJECTED, UNDRAFTED
from headrace.back.runner.batch import shape_of
from headrace.back.runner.results import LaunchedStep, SampledTokens
from headrace.base.errors import HeadraceError, InvalidRequest, NonFiniteLogits
from headrace.base.wire.step import StepPlan


def plan_of(num_tokens: list[int]) -> StepPlan:
    none, count = np.empty(0, np.int32), len(num_tokens)
    plan = StepPlan(
        step=0, ends=none, starts=[], block_group=none, block_row=none, block_index=none,
        block_id=none, rows=np.arange(count, dtype=np.int32),
        num_tokens=np.array(num_tokens, np.int32), num_computed=np.full(count, 9, np.int32),
        sample=np.ones(count, np.bool_),
    )  # fmt: skip
    return replace(plan, drafts=plan.num_tokens - 1)


def test_tokens_before_a_failure_behind_accepted_drafts_stand() -> None:
    """SPC-06: rows that fail at their third, their first and at no token; what was not accepted
    does not fail."""
    plan = plan_of([4, 3, 3])
    value = np.ones(10, np.float32)
    value[[2, 3, 4, 9]] = np.nan
    tokens = np.array([5, 6, 7, 8, 1, REJECTED, UNDRAFTED, 3, 4, REJECTED], np.int32)
    lost: list[list[int]] = []
    step = LaunchedStep(
        plan=plan,
        shape=shape_of(plan),
        sampled=SampledTokens(tokens=tokens, max_logit=value),
        lost=lambda rows: lost.append(rows.tolist()),
    )
    result = step.result()
    assert result.tokens.tolist() == [[5, 6, -1, -1], [-1] * 4, [3, 4, -1, -1]]
    assert [index for index, _ in result.failed] == [0, 1] and set(lost[0]) == {0, 1}


def test_a_row_that_was_refused_gains_nothing() -> None:
    plan = plan_of([2, 2])
    sampled = SampledTokens(tokens=np.arange(4, dtype=np.int32), max_logit=np.ones(4, np.float32))
    refused: dict[int, HeadraceError] = {1: InvalidRequest("too much is asked for")}
    step = LaunchedStep(plan=plan, shape=shape_of(plan), sampled=sampled, refused=refused)
    assert step.result().tokens.tolist() == [[0, 1], [-1, -1]]


def test_a_masked_row_of_minus_infinity_has_no_admissible_token() -> None:
    """Also where the model's own logits were so: NaN and infinity are the model's fault still."""
    values = np.array([-np.inf, np.nan, np.inf, 1.0], np.float32)
    tokens = np.arange(4, dtype=np.int32)
    failed = SampledTokens(tokens=tokens, max_logit=values, masked=True).read()[1]
    kinds = {0: InvalidRequest, 1: NonFiniteLogits, 2: NonFiniteLogits}
    assert {row: type(error) for row, error in failed.items()} == kinds
    plain = SampledTokens(tokens=tokens, max_logit=values).read()[1]
    assert isinstance(plain[0], NonFiniteLogits)
