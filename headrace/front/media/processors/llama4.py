"""Llama 4: tiles with marks between them, and the whole picture behind them.

As transformers 5.23 (image_processing_llama4.py, processing_llama4.py).
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.square import SquareProcessor


class Llama4Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The tiles row by row, then the whole."""
        settings, side = self._settings, self._settings.side
        rows, columns = best_canvas(picture.height, picture.width, settings.tiles[1], side)
        ground = self._on_canvas(picture, rows * side, columns * side)
        layout = list[str | int](["<|image_start|>"])
        squares = list[Image.Image]()
        if rows * columns > 1:
            for row in range(rows):
                for column in range(columns):
                    left, top = column * side, row * side
                    layout.append(len(squares))
                    squares.append(ground.crop((left, top, left + side, top + side)))
                    last = column == columns - 1
                    layout.append("<|tile_y_separator|>" if last else "<|tile_x_separator|>")
            ground = resized(picture, height=side, width=side, resample=settings.resample)
        layout += ["<|image|>", len(squares), "<|image_end|>"]
        inputs = tuple(self.input_of(square) for square in (*squares, ground))
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def _on_canvas(self, picture: Image.Image, height: int, width: int) -> Image.Image:
        """The picture in the upper left: made smaller where it does not fit, larger up to a
        tile."""
        side = self._settings.side
        most = (
            min(max(picture.height, side), height),
            min(max(picture.width, side), width),
        )
        high, wide = _within(picture.height, picture.width, *most)
        ground = Image.new("RGB", (width, height))
        small = resized(picture, height=high, width=wide, resample=self._settings.resample)
        ground.paste(small, (0, 0))
        return ground


def best_canvas(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles: of those that let a picture be made larger, the ones that do so
    least, else the ones that make it smaller least; among equal ones the fewest."""
    canvases = _canvases(most)
    sizes_2C = np.array(canvases, np.float32).T * side
    down, across = sizes_2C[0] / np.float32(height), sizes_2C[1] / np.float32(width)
    scales = np.minimum(across, down)
    larger = scales[scales >= 1]
    scale = larger.min() if len(larger) else scales.max()
    fitting = [canvas for canvas, one in zip(canvases, scales, strict=True) if one == scale]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


def _canvases(most: int) -> list[tuple[int, int]]:
    """All of up to so many tiles, those of one ratio together, the larger first."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return [canvas for canvases in by_ratio.values() for canvas in canvases]


def _within(height: int, width: int, most_high: int, most_wide: int) -> tuple[int, int]:
    across, down = most_wide / width, most_high / height
    if across < down:
        high, wide = min(math.floor(height * across), most_high), most_wide
    else:
        high, wide = most_high, min(math.floor(width * down), most_wide)
    return max(high, 1), max(wide, 1)
