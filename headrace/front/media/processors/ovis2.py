"""Ovis 2: the whole picture, and as many tiles as cover nine tenths of it, marks between them.

As transformers 5.23 (image_processing_pil_ovis2.py, processing_ovis2.py).
"""

from __future__ import annotations

from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.square import SquareProcessor

COVERED = 0.9


class Ovis2Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The whole, then the tiles row by row."""
        settings, side = self._settings, self._settings.side
        columns, rows = covering_grid(picture.height, picture.width, settings.tiles[1], side)
        height, width = rows * side, columns * side
        large = resized(picture, height=height, width=width, resample=settings.resample)
        if rows * columns == 1:
            layout = ("<IMG_START>", 0, "<IMG_GRID><IMG_END>")
            return ProcessedMedia(inputs=(self.input_of(large),), layout=layout)
        squares = [resized(picture, height=side, width=side, resample=settings.resample)]
        pieces = list[str | int](["<IMG_START>", 0, "<IMG_GRID>"])
        for y in range(rows):
            for x in range(columns):
                pieces.append(len(squares))
                box = (x * side, y * side, (x + 1) * side, (y + 1) * side)
                squares.append(large.crop(box))
                if x < columns - 1:
                    pieces.append("<IMG_COL>")
            if y < rows - 1:
                pieces.append("<IMG_ROW>")
        inputs = tuple(self.input_of(square) for square in squares)
        return ProcessedMedia(inputs=inputs, layout=(*pieces, "<IMG_END>"))


def covering_grid(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """Of grids of up to so many tiles the smallest whose tiles show more than COVERED of the
    picture, the first number the columns; where none does, the one that shows most."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    shown = [(grid, _covered(height, width, grid, side)) for grid in grids]
    enough = [each for each in shown if each[1] > COVERED]
    if enough:
        return min(enough, key=lambda each: (each[0][0] * each[0][1], -each[1]))[0]
    return min(shown, key=lambda each: (-each[1], each[0][0] * each[0][1]))[0]


def _covered(height: int, width: int, grid: tuple[int, int], side: int) -> float:
    """The share of a picture's area that its parts keep at the size of a tile. As in the reference
    the parts are cut with as many rows as the grid's first number says."""
    total = 0.0
    high, wide = height // grid[0], width // grid[1]
    for row in range(grid[0]):
        for column in range(grid[1]):
            h = height - row * high if row == grid[0] - 1 else high
            w = width - column * wide if column == grid[1] - 1 else wide
            long, short = float(max(h, w)), float(min(h, w))
            if long > side:
                short, long = short / long * side, float(side)
            total += long * short
    return total / (width * height)
