"""Several towers of one model as one encoder: each takes its own kinds of media."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.layers.vision.encoder import Grid, MediaEncoder, Passes, resting


class Towers:
    """`MediaEncoder` of several, which differ in kinds and give rows of one width. The first one's
    positions are those of all; what a tower does not add behind layers is zero."""

    def __init__(self, *towers: MediaEncoder) -> None:
        first = towers[0]
        widths = {tower.width for tower in towers}
        assert len(widths) == 1, widths
        self._tower_of = {form.kind: tower for tower in towers for form in tower.forms}
        self.forms = tuple(form for tower in towers for form in tower.forms)
        assert len(self.forms) == len(self._tower_of), self.forms
        self.width, self.dtype = first.width, first.dtype
        self.layers = max(tower.layers for tower in towers)
        self.rope: AxesRope | None = first.rope

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        tower = self._tower_of[kind]
        y_MW = tower.encode(kind, rows_NB, grids)
        return F.pad(y_MW, (0, self.width * (self.layers - tower.layers)))

    def rests(self, kind: str) -> int:
        """See RestingEncoder."""
        tower = resting(self._tower_of[kind], kind)
        return 0 if tower is None else tower.rests(kind)

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        tower = resting(self._tower_of[kind], kind)
        assert tower is not None, kind
        y_MW = yield from tower.passes(kind, rows_NB, grids)
        return F.pad(y_MW, (0, self.width * (self.layers - self._tower_of[kind].layers)))
