"""A step that was launched, and its result: read on the host once the device has passed the step's moment (ENG-07).

Nothing here waits before `result` is called, and that may be on another thread than the one that launches steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType

import numpy as np

from headrace.back.runner.batch import StepShape
from headrace.back.runner.capture import Piece
from headrace.back.runner.pooler import Vectors
from headrace.back.runner.steps import Moment, Now
from headrace.back.sampling.logprobs import Told
from headrace.back.sampling.prompt_logprobs import Scored
from headrace.back.sampling.sampler import failures
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.step import RowLogprobs, StepPlan, StepResult


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The host's copies of what was sampled for N rows; `left`: see sampler.Sampled.

    `index`: where these rows are, if the copies hold more.
    """

    tokens: np.ndarray
    best: np.ndarray
    left: np.ndarray | None = None
    told: Told | None = None
    index: np.ndarray | EllipsisType = ...

    def read(self) -> tuple[np.ndarray, dict[int, HeadraceError]]:
        """The tokens int32 [N], and index into them -> why that row has none."""
        left = None if self.left is None else self.left[self.index]
        return self.tokens[self.index], failures(self.best[self.index], left)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One step on its way.

    `refused` are errors known at launch, by index into plan.rows; `lost` is told the rows whose logits were not finite,
    before their requests end.
    """

    plan: StepPlan
    moment: Moment = field(default_factory=Now)
    shape: StepShape | None = None
    draws: Draws | None = None
    prompts: list[tuple[int, Scored]] = field(default_factory=list)
    pooled: Sequence[Vectors] = ()
    captured: Sequence[Piece] = ()
    refused: dict[int, HeadraceError] = field(default_factory=dict)
    lost: Callable[[np.ndarray], None] | None = None

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self.moment.done()

    def result(self) -> StepResult:
        """Waits for the device; indices of sampled rows become indices into plan.rows, as those of `refused` are."""
        self.moment.wait()
        tokens = np.full(self.plan.rows.size, -1, np.int32)
        failed = dict(self.refused)
        logprobs: list[RowLogprobs] = []
        if self.draws is not None:
            assert self.shape is not None
            index_N = self.shape.sampled
            tokens[index_N], bad = self.draws.read()
            if bad and self.lost is not None:
                self.lost(self.shape.sampled_row[list(bad)])
            failed |= {int(index_N[i]): error for i, error in bad.items()}
            tokens[list(failed)] = -1
            if self.draws.told is not None:
                logprobs = [
                    RowLogprobs(int(index_N[row.index]), row.ids, row.values, row.rank)
                    for row in self.draws.told.rows()
                    if row.index not in bad
                ]
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=[(index, scored.read()) for index, scored in self.prompts],
            pooled=[told for vectors in self.pooled for told in vectors.read(failed)],
            captured=[piece.read() for piece in self.captured],
            failed=[(index, to_wire(error)) for index, error in failed.items()],
        )
