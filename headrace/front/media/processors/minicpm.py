"""MiniCPM-V and MiniCPM-OCR: the whole picture, and behind it slices on a grid that follows its
ratio (Yao et al. 2024, MiniCPM-V, section 3.1.1).

As transformers 5.23 (image_processing_pil_minicpmv4_6.py, processing_minicpmv4_6.py)."""

from __future__ import annotations

import math

from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class MiniCpmProcessor(SquareProcessor):
    """See `Processor`: `side` of a square with as many pixels as a slice, `tiles[1]` slices at
    most. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The whole between its marks, then the rows of slices."""
        grid = self._grid(picture)
        height, width = self._fitted(picture.height, picture.width, enlarges=grid is None)
        inputs = [self._input(resized(picture, height=height, width=width))]
        layout: list[str | int] = ["<image>", 0, "</image>"]
        if grid is None:
            return ProcessedMedia(inputs=tuple(inputs), layout=tuple(layout))
        rows, columns = grid
        refined = self._refined(picture, rows, columns)
        high, wide = refined.height // rows, refined.width // columns
        for row in range(rows):
            for column in range(columns):
                box = (column * wide, row * high, (column + 1) * wide, (row + 1) * high)
                newline = "\n" if row and not column else ""
                layout += [f"{newline}<slice>", len(inputs), "</slice>"]
                inputs.append(self._input(refined.crop(box)))
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(layout))

    def _input(self, picture: Image.Image) -> TowerInput:
        settings = self._settings
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        return TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)

    def _grid(self, picture: Image.Image) -> tuple[int, int] | None:
        """Rows and columns of slices: of nearly as many as the pixels ask for, those whose ratio is
        nearest, of equals the ones with more rows; None: the whole is enough."""
        side, most = self._settings.side, self._settings.tiles[1]
        wanted = min(math.ceil(picture.width * picture.height / side**2), most)
        if wanted <= 1:
            return None
        log_ratio = math.log(picture.width / picture.height)
        best, least = (1, 1), float("inf")
        for count in (wanted - 1, wanted, wanted + 1):
            if count == 1 or count > most:
                continue
            for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
                columns = count // rows
                error = abs(log_ratio - math.log(columns / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, columns), error
        return best

    def _fitted(self, height: float, width: float, *, enlarges: bool) -> tuple[int, int]:
        """The nearest whole windows, of a picture as large as a slice if it is larger, or smaller
        and to be enlarged."""
        side, unit = self._settings.side, self._settings.patch * self._settings.merge
        if height * width > side**2 or enlarges:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return _whole(height, unit), _whole(width, unit)

    def _refined(self, picture: Image.Image, rows: int, columns: int) -> Image.Image:
        """The picture at a size whose slices are whole windows."""
        width, height = _whole(picture.width, columns), _whole(picture.height, rows)
        high, wide = self._fitted(height / rows, width / columns, enlarges=True)
        return resized(picture, height=high * rows, width=wide * columns)


def _whole(length: float, unit: int) -> int:
    """The nearest multiple, one at least."""
    return max(round(length / unit) * unit, unit)
