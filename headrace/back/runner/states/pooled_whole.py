"""The state of decoders that were trained to embed with attention to both sides, and to generate
with attention to what is before (Muennighoff et al. 2024): which rows are pooled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.back.attention.mutual import with_mutual
from headrace.back.attention.plan import Batch
from headrace.back.runner.batch import StepShape
from headrace.back.runner.states.plain import PlainDecoder
from headrace.base.wire.step import RowStart


class PooledWhole(PlainDecoder):
    """A plain decoder's, where all tokens of a prompt that is pooled see each other. Such a prompt
    comes whole (WorkerFacts.pools_whole)."""

    pools_whole = True

    def __init__(self, max_rows: int) -> None:
        self._prompt = np.zeros(max_rows + 1, np.int64)
        self.host_until: np.ndarray | None = self._prompt

    def end(self, rows: np.ndarray) -> None:
        """See ModelState."""
        self._prompt[rows] = 0

    def start(self, start: RowStart) -> None:
        """See ModelState."""
        self._prompt[start.row] = start.num_prompt if start.pooling is not None else 0

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch with plans in which tokens of pooled prompts see each other, if there are
        any."""
        prompts = self._prompt[shape.rows].tolist()
        if not any(prompts):
            return batch
        spans = [((0, length),) if length else () for length in prompts]
        return replace(batch, plans=tuple(with_mutual(plan, spans) for plan in batch.plans))
