"""What the runner asks of the part of a model that sees: rows of patches in, rows of hidden size
out. Families build it; `runner/states/media.py` runs it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.base.wire.media import MediaForm

Grid = tuple[int, int, int]
"""t, h, w in patches."""

Passes: TypeAlias = Generator[None, None, torch.Tensor]
"""A pass of an encoder that may be left alone for a while wherever it yields, and returns what
`MediaEncoder.encode` does."""


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


@runtime_checkable
class RestingEncoder(Protocol):
    """A MediaEncoder whose passes may rest between layers, so that steps of the decoder come in
    between."""

    def rests(self, kind: str) -> int:
        """How often a pass over this kind yields; 0: it does not."""
        ...

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """`encode`, which goes on whenever the next value is asked for."""
        ...


@runtime_checkable
class WrappedEncoder(Protocol):
    """A MediaEncoder around one that gives the same."""

    @property
    def inner(self) -> MediaEncoder:
        """That one."""
        ...


def run_through(passes: Passes) -> torch.Tensor:
    """A pass without a rest."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


def resting(encoder: MediaEncoder, kind: str) -> RestingEncoder | None:
    """The encoder of a kind as one whose passes may rest, if it is."""
    while isinstance(encoder, WrappedEncoder):
        encoder = encoder.inner
    return encoder if isinstance(encoder, RestingEncoder) and encoder.rests(kind) else None
