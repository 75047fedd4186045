"""Granite Docling's pages: tiles with their places as text, and the whole behind them.

As transformers 5.23 (image_processing_pil_granite_docling.py, processing_granite_docling.py).
"""

from __future__ import annotations

from PIL import Image

from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.canvas import AyaProcessor
from headrace.front.media.processors.idefics3 import AROUND, WHOLE
from headrace.front.media.processors.square import tiling

LONGEST = 16
"""Rows and columns that the tokenizer has places for."""


class DoclingProcessor(AyaProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The tiles row by row, then the whole if there are several."""
        inputs = self.squares(picture)
        columns, rows = self.shape_of(picture)
        layout: list[str | int] = []
        before = ""
        for y in range(rows):
            for x in range(columns):
                layout += [f"{before}{AROUND}<row_{y + 1}_col_{x + 1}>", y * columns + x]
                before = ""
            before = "\n"
        if rows * columns > 1:
            layout += [f"\n\n{AROUND}{WHOLE}", rows * columns]
        layout.append(AROUND if rows * columns > 1 else "\n")
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def shape_of(self, picture: Image.Image) -> tuple[int, int]:
        """Columns and rows."""
        (least, most), side = self._settings.tiles, self._settings.side
        if most == 1:
            return 1, 1
        width, height = picture.size
        shape = tiling(width, height, (least, most), side, longest=LONGEST)
        dense, scale, low, high = self._settings.dense
        ratio = width / height
        if not dense or not (scale or low) or (low and ratio <= low) or (high and ratio > high):
            return shape
        if scale and shape[0] * side / width >= scale:
            return shape
        return tiling(width, height, (least, dense), side, longest=LONGEST)
