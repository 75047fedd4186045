"""Steps of fixed sizes that reach placeholders of media: sizes of their own, whose tensors the
state fills ahead of each (states/media_places.py). Whether they give what exact steps give is found
out by the made-up step that a warm-up runs; until then, and where they do not, such steps are
exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.launches import are_launched
from headrace.back.runner.batch import StepShape
from headrace.back.runner.results import StepOutputs
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.states.state import ModelState
from headrace.base.wire.step import StepPlan

log = logging.getLogger(__name__)
AGREEMENT = 0.1
"""How far such a step may lie from an exact one, of the norm of what that leaves: kernels differ by
the size of a step, so that in bfloat16 sums are rounded otherwise."""


class MediaSteps:
    """What a runner's buckets do about media. `records`: whether they might take such steps;
    `trusted`: whether they do; `waits`: whether steps that reach placeholders are run by
    themselves, as all are with `apart`."""

    def __init__(self, state: ModelState, max_tokens: int, block_tokens: int, apart: bool) -> None:
        self._state, self._block_tokens = state, block_tokens
        self._places = None if apart else state.recorded_media(max_tokens)
        self.records = self._places is not None
        self.trusted = False
        self.waits = state.host_until is not None
        self._compared = False

    def reached(self, shape: StepShape) -> bool:
        """Whether a token of the step comes before its row's `host_until`."""
        until = self._state.host_until
        return until is not None and bool((shape.position_T < until[shape.row_T]).any())

    def bucket(self, bucket: Bucket, shape: StepShape) -> Bucket:
        """The bucket of a step; what its tokens stand for is where it reads that."""
        if self._places is None or not self.reached(shape):
            return bucket
        self._places.send(shape, tokens=bucket.tokens)
        return replace(bucket, media=True)

    def on(self, bucket: Bucket, batch: Batch) -> Batch:
        """The batch of a bucket."""
        return self._places.on(batch) if self._places is not None and bucket.media else batch

    def compared(
        self,
        exact: StepOutputs,
        plan: StepPlan,
        shape: StepShape,
        run: Callable[..., StepOutputs],
    ) -> StepOutputs:
        """`exact`, what a step that was run by itself has left. Behind a made-up one of one row
        `run` runs it once more in its bucket, and what both leave of the last token says whether
        such steps are trusted. Blocks of made-up steps are one and the same: a longer step's tokens
        write over each other's keys, in any order."""
        if self._compared or not self.records or plan.step >= 0 or not are_launched():
            return exact
        if shape.max_kv_len <= self._block_tokens and self.reached(shape):
            exact_E = exact.out.hidden_TE[-1].float()
            self._compared = self.trusted = True
            self.waits = False
            self.trusted = self._agrees(exact_E, lambda: run(plan, shape, take_masks=_none))
            self.waits = not self.trusted
        return exact

    def _agrees(self, exact_E: torch.Tensor, again: Callable[[], StepOutputs]) -> bool:
        try:
            got_E = again().out.hidden_TE[0].float()
            off = float((got_E - exact_E).norm() / exact_E.norm())
        except RuntimeError as error:
            log.warning("steps with media are not recorded: %s", error)
            return False
        if off <= AGREEMENT:
            return True
        log.warning("steps with media are not recorded: off by %.3g of an exact one", off)
        return False


def _none() -> None:
    """Made-up steps have no masks."""
