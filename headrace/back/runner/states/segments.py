"""The state of encoders with token types: where the second text of a pair begins, per row (Devlin
et al. 2018)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.upload import to_device
from headrace.back.runner.batch import StepShape
from headrace.back.runner.states.plain import PlainEncoder
from headrace.base.wire.step import RowStart

_NEVER = np.iinfo(np.int64).max


class Segments(PlainEncoder):
    """ModelState: segments_T is 1 from the second text on, 0 before it."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._second_at = np.full(max_rows, _NEVER, np.int64)
        self._device = device

    def start(self, start: RowStart) -> None:
        """Remembers where the second text begins."""
        second_at = 0 if start.pooling is None else start.pooling.second_at
        self._second_at[start.row] = second_at or _NEVER

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch with its segments."""
        bound_T = to_device(self._second_at[shape.row_T], self._device)
        return replace(batch, segments_T=(batch.positions_T >= bound_T).long())
