"""Vectors in place of a prompt's tokens, as they enter the first layer: what clients of
`prompt_embeds` send. To the runner they are one more kind of medium, whose encoder gives what it
gets; so chunks, prefix caching and preemption know them.

N vectors, E hidden size, W what an encoder gives for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.back.layers.vision.encoder import Grid, MediaEncoder, Passes, RestingEncoder, resting
from headrace.base.wire.media import PROMPT, MediaForm


class PromptVectors:
    """`MediaEncoder` of vectors, and of what `others` encodes, if there is anything."""

    def __init__(self, others: MediaEncoder | None, *, width: int, dtype: torch.dtype) -> None:
        form = MediaForm(kind=PROMPT, row_bytes=4 * width, max_t=1)
        self._others = others
        self.width, self.dtype = width, dtype
        self.layers = 0 if others is None else others.layers
        self.rope = None if others is None else others.rope
        self.forms = (form,) if others is None else (*others.forms, form)

    def around(self, wrap: Callable[[MediaEncoder], MediaEncoder]) -> PromptVectors:
        """The same, of what `wrap` makes of the others."""
        others = None if self._others is None else wrap(self._others)
        return PromptVectors(others, width=self.width, dtype=self.dtype)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder: vectors are float32, [N, 4 E] bytes; behind layers nothing is added."""
        if kind != PROMPT:
            assert self._others is not None, kind
            return self._others.encode(kind, rows_NB, grids)
        x_NE = rows_NB.view(torch.float32).to(self.dtype)
        return torch.nn.functional.pad(x_NE, (0, self.width * self.layers))

    def rests(self, kind: str) -> int:
        """See RestingEncoder."""
        once = self._resting(kind)
        return 0 if once is None else once.rests(kind)

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        once = self._resting(kind)
        assert once is not None, kind
        return once.passes(kind, rows_NB, grids)

    def _resting(self, kind: str) -> RestingEncoder | None:
        return None if self._others is None or kind == PROMPT else resting(self._others, kind)
