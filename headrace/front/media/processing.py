"""What a family's processor is given and what it returns: plain data, so that it can run in a
process of its own.

A processor turns one medium into inputs of the vision tower and the tokens that stand for them.
Patches stay uint8: rescaling and normalization happen in the tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from headrace.base.wire.media import MediaCut

if TYPE_CHECKING:
    from PIL import Image

MAX_PATCHES = 65_536
"""Patches of one input."""


class Sampling(msgspec.Struct, frozen=True):
    """What a video is before it is sampled: its number of frames and their rate."""

    num_frames: int
    rate: float


class TowerInput(msgspec.Struct, frozen=True, kw_only=True):
    """One input of the tower. `grid` (t, h, w) in patches; `rows` uint8 [t * h * w, row bytes];
    `step_s`: seconds between the grid's frames. `cut`: what of it is shown. `num_tokens`: where
    they do not follow from the grid alone."""

    kind: str
    grid: tuple[int, int, int]
    rows: np.ndarray
    step_s: float = 0.0
    num_tokens: int = 0
    cut: MediaCut | None = None


Layout = tuple[str | int | tuple[int, int, int], ...]
"""Texts, indices of inputs, and parts of inputs: the index, the tokens before, and their number."""


class ProcessedMedia(msgspec.Struct, frozen=True, kw_only=True):
    """A medium's inputs, and its `layout`: texts of the family, and indices of inputs, each of
    which takes as many placeholder tokens as it has merged patches. `row_break`: text behind each
    row of them but the last; `row`: placeholders of one and tokens of its break, where
    rows are not those of patches; then they count among an input's `num_tokens`."""

    inputs: tuple[TowerInput, ...]
    layout: Layout
    row_break: str = ""
    row: tuple[int, int] = (0, 0)


class Processor(Protocol):
    """What a family states."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """An upright RGB picture; InvalidRequest where the family cannot take its size."""
        ...

    def frames_of(self, video: Sampling) -> list[int]:
        """Which frames of a video are taken, in rising order."""
        ...

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """The frames at `indices`, all of one size; each is let go before the next is taken."""
        ...
