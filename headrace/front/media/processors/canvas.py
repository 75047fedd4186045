"""Aya Vision's and Command A Vision's tiles between marks of their own.

As transformers 5.23 (processing_aya_vision.py, processing_cohere2_vision.py,
image_processing_cohere2_vision.py). Squares are cut as InternVL's are.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor, tiling


class AyaProcessor(SquareProcessor):
    """See `Processor`: numbered tiles, then the whole. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """An input for each tile, behind its name."""
        inputs = self.squares(picture)
        layout: list[str | int] = ["<|START_OF_IMG|>"]
        for number in range(len(inputs) - 1):
            layout += [f"TILE_{number + 1}", number]
        layout += ["TILE_GLOBAL", len(inputs) - 1, "<|END_OF_IMG|>"]
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def squares(self, picture: Image.Image) -> tuple[TowerInput, ...]:
        """The tiles row by row, and the whole behind them if there are several."""
        side, resample = self._settings.side, self._settings.resample
        columns, rows = self.shape_of(picture)
        whole = resized(picture, height=rows * side, width=columns * side, resample=resample)
        squares = [
            whole.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
            for y in range(rows)
            for x in range(columns)
        ]
        if len(squares) > 1:
            squares.append(resized(picture, height=side, width=side, resample=resample))
        return tuple(self.input_of(square) for square in squares)

    def shape_of(self, picture: Image.Image) -> tuple[int, int]:
        """Columns and rows."""
        return tiling(picture.width, picture.height, self._settings.tiles, self._settings.side)


class CommandProcessor(AyaProcessor):
    """A break behind each tile, and tiles that enlarge a picture as little as they can."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """See AyaProcessor."""
        inputs = self.squares(picture)
        before, line, behind = self._settings.marks
        layout: list[str | int] = [before]
        for number in range(len(inputs)):
            layout += [number, line]
        return ProcessedMedia(inputs=inputs, layout=(*layout[:-1], line + behind))

    def shape_of(self, picture: Image.Image) -> tuple[int, int]:
        """Columns and rows."""
        side, most = self._settings.side, self._settings.tiles[1]
        return canvas(picture.width, picture.height, most=most, side=side)


def canvas(width: int, height: int, *, most: int, side: int) -> tuple[int, int]:
    """Columns and rows of the tiles that enlarge a picture least, or, where each choice makes it
    smaller, shrink it least."""
    choices = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if columns * rows <= most
    ]
    choices.sort(key=lambda one: one[0] * one[1])
    scales = (np.array(choices) * side / np.array([width, height])).min(axis=1)
    if (scales < 1).all():
        return choices[int(scales.argmax())]
    return choices[int(np.where(scales < 1, np.inf, scales).argmin())]
