"""Idefics 3 and SmolVLM: tiles with their places as text, and the whole image behind them.

As transformers 5.23 (image_processing_pil_idefics3.py, processing_idefics3.py).
"""

from __future__ import annotations

import math

from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.square import SquareProcessor

MOST_PIXELS = 4096
"""Of a side."""
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"


class Idefics3Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The tiles row by row, then the whole."""
        settings, side = self._settings, self._settings.side
        height, width = _bounded(picture.height, picture.width, settings.longest)
        picture = self._at(picture, height, width)
        if settings.tiles[1] == 1:  # not cut
            one = self.input_of(self._at(picture, side, side))
            return ProcessedMedia(inputs=(one,), layout=(AROUND + WHOLE, 0, AROUND))
        height, width = _whole_tiles(height, width, side)
        picture = self._at(picture, height, width)
        rows, columns = height // side, width // side
        if rows * columns == 1:
            return ProcessedMedia(
                inputs=(self.input_of(picture),), layout=(AROUND + WHOLE, 0, AROUND)
            )
        squares = list[Image.Image]()
        layout = list[str | int]()
        before = ""
        for y in range(rows):
            for x in range(columns):
                box = (x * side, y * side, (x + 1) * side, (y + 1) * side)
                layout += [f"{before}{AROUND}<row_{y + 1}_col_{x + 1}>", len(squares)]
                squares.append(picture.crop(box))
                before = ""
            before = "\n"
        layout += ["\n\n" + AROUND + WHOLE, len(squares), AROUND]
        squares.append(self._at(picture, side, side))
        inputs = tuple(self.input_of(square) for square in squares)
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def _at(self, picture: Image.Image, height: int, width: int) -> Image.Image:
        resample = self._settings.resample
        return resized(picture, height=height, width=width, resample=resample)


def _bounded(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side as long as it may be, the other one even, both at most MOST_PIXELS."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MOST_PIXELS:
        width, height = MOST_PIXELS, int(MOST_PIXELS / ratio)
    elif height > width and height > MOST_PIXELS:
        height, width = MOST_PIXELS, int(MOST_PIXELS * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Multiples of a tile's side, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return height, width
