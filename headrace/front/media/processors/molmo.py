"""Molmo 1: the whole picture in a black square, then enlarged into as many squares as suit its
size, which overlap.

As its authors' processor (allenai/Molmo-7B-D-0924), which resizes in floats; here values are whole
numbers. What the squares have in common is sent once, and a byte behind the pixels of each patch
says how much of it is the picture's. The processor's marks begin one square late, and so they do
here: the small square has those of the first large one.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor

MARGIN = 4
PADDED, PARTLY = 1, 2
START, COLUMN, END = "<im_start>", "<im_col>", "<im_end>"


class MolmoProcessor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """Two inputs: a small square, and the large whole."""
        settings, side = self._settings, self._settings.side
        margin = 2 * MARGIN * settings.patch
        step = side - margin
        down, across = tiling(
            picture.height - margin, picture.width - margin, step, settings.tiles[1]
        )
        large, marks_HW = self._fitted(picture, down * step + margin, across * step + margin)
        small, _ = self._fitted(picture, side, side)
        patches = side // settings.patch
        first_HW = marks_HW[:patches, :patches]
        if down == across == 1:
            marks_HW = np.full_like(marks_HW, PARTLY)
        inputs = (self._marked(small, first_HW), self._marked(large, marks_HW))
        texts = (START, 0, f"{COLUMN}{END}{START}", 1, f"{COLUMN}{END}")
        return ProcessedMedia(inputs=inputs, layout=texts, row_break=COLUMN)

    def _fitted(
        self, picture: Image.Image, height: int, width: int
    ) -> tuple[Image.Image, np.ndarray]:
        """The picture in the middle of black, and marks uint8 [patches down, across]."""
        scale = np.float32(
            min(np.float32(height) / picture.height, np.float32(width) / picture.width)
        )
        high, wide = (
            max(1, int(np.float32(one) * scale)) for one in (picture.height, picture.width)
        )
        ground = Image.new("RGB", (width, height))
        top, left = (height - high) // 2, (width - wide) // 2
        small = resized(picture, height=high, width=wide, resample=Image.Resampling.BILINEAR.value)
        ground.paste(small, (left, top))
        patch = self._settings.patch
        seen = np.outer(_seen(top, high, height, patch), _seen(left, wide, width, patch))
        marks = np.where(seen == 0, PADDED, np.where(seen < patch**2, PARTLY, 0))
        return ground, marks.astype(np.uint8)

    def _marked(self, picture: Image.Image, marks_HW: np.ndarray) -> TowerInput:
        settings = self._settings
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        _, marks = patches_of(marks_HW[None, None], 1, merge=settings.merge, channels=1)
        return TowerInput(kind="image", grid=grid, rows=np.concatenate((rows, marks), axis=1))


def _seen(first: int, count: int, size: int, patch: int) -> np.ndarray:
    """Of `count` pixels from `first` on, how many each patch of `size` pixels has."""
    starts = np.arange(0, size, patch)
    inside = np.minimum(starts + patch, first + count) - np.maximum(starts, first)
    seen: np.ndarray = np.clip(inside, 0, None)
    return seen


def tiling(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Squares down and across: those that enlarge a picture least, or where all make it smaller,
    those that do so least; of equal ones the fewest."""
    counts = range(1, most + 1)
    choices = [(i, j) for i in counts for j in counts if i * j <= most]
    choices.sort(key=lambda one: (one[0] * one[1], one[0]))
    size = np.array([height, width], np.float32)
    scales = (np.array(choices, np.float32) * side / size).min(1)
    enlarging = np.where(scales < 1.0, np.float32(10e9), scales)
    best = scales.argmax() if (scales < 1).all() else enlarging.argmin()
    return choices[int(best)]
