"""What the runner asks of the part of a model that sees: rows of patches in, rows of hidden size
out. Families build it; `runner/states/media.py` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.base.wire.media import MediaForm

Grid = tuple[int, int, int]
"""t, h, w in patches."""


class MediaEncoder(Protocol):
    """forms: what it takes. width: E of the decoder. layers: the first decoder layers behind which
    it adds to the residual. dtype: of what it gives. rope: the positions that its inputs give to a
    prompt, None: those of text."""

    forms: tuple[MediaForm, ...]
    width: int
    layers: int
    dtype: torch.dtype
    rope: AxesRope | None

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Encodes inputs of one kind, end to end: rows_NB uint8 [N, form.row_bytes] on the device;
        returns [M, width * (1 + layers)] of their M tokens: embeddings, then what is added behind
        each layer."""
        ...
