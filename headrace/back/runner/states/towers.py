"""The state of a model of which the towers are there alone: inputs are encoded as ever, and no
layer reads the positions that they give to tokens."""

from __future__ import annotations

from headrace.back.attention.plan import Batch
from headrace.back.kernels.position_shift.op import PositionShift
from headrace.back.runner.states.media import Media


class TowersAlone(Media):
    """Media without a decoder behind it, whose plans of attention say where rows begin."""

    def _move(self, shift: PositionShift, batch: Batch) -> None:
        """Positions stay."""
