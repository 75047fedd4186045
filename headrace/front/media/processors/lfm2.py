"""LFM2-VL: any ratio within bounds, and large pictures as tiles with their places and the whole
behind them.

As transformers 5.23 (image_processing_lfm2_vl.py, processing_lfm2_vl.py).
"""

from __future__ import annotations

import math

from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor, tiling

TOLERANCE = 2.0
"""So many times the most pixels a picture may have before it is cut."""


class Lfm2Processor(SquareProcessor):
    """See `Processor`: `side` of a tile, `image_pixels` of the whole, `marks`: that
    before the whole behind tiles, if it stands there. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The whole, or its tiles and the whole."""
        settings, side = self._settings, self._settings.side
        height, width = self.fitted_size(picture.height, picture.width)
        whole = self._input(picture, height, width)
        if not self._is_large(picture):
            return ProcessedMedia(inputs=(whole,), layout=("<|image_start|>", 0, "<|image_end|>"))
        columns, rows = tiling(picture.width, picture.height, settings.tiles, side)
        sized = resized(
            picture, height=rows * side, width=columns * side, resample=settings.resample
        )
        inputs: list[TowerInput] = []
        layout: list[str | int] = ["<|image_start|>"]
        for row in range(rows):
            for column in range(columns):
                box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                layout += [f"<|img_row_{row + 1}_col_{column + 1}|>", len(inputs)]
                inputs.append(self._input(sized.crop(box), side, side))
        for mark in settings.marks:
            layout += [mark, len(inputs)]
            inputs.append(whole)
        return ProcessedMedia(inputs=tuple(inputs), layout=(*layout, "<|image_end|>"))

    def fitted_size(self, height: int, width: int) -> tuple[int, int]:
        """Whole windows, nearly of the same ratio, within the bounds."""
        unit, (least, most) = self._unit, self._settings.image_pixels
        high, wide = self._rounded(height), self._rounded(width)
        if high * wide > most:
            scale = math.sqrt(height * width / most)
            high = max(unit, math.floor(height / scale / unit) * unit)
            wide = max(unit, math.floor(width / scale / unit) * unit)
        elif high * wide < least:
            scale = math.sqrt(least / (height * width))
            high, wide = (math.ceil(one * scale / unit) * unit for one in (height, width))
        return high, wide

    @property
    def _unit(self) -> int:
        return self._settings.patch * self._settings.merge

    def _rounded(self, length: int) -> int:
        return max(self._unit, round(length / self._unit) * self._unit)

    def _is_large(self, picture: Image.Image) -> bool:
        """Whether it is to be cut."""
        if self._settings.tiles == (1, 1):
            return False
        least = self._settings.patch
        high, wide = (
            max(least, round(one / self._unit) * self._unit)
            for one in (picture.height, picture.width)
        )
        return high * wide > self._settings.image_pixels[1] * TOLERANCE

    def _input(self, picture: Image.Image, height: int, width: int) -> TowerInput:
        settings = self._settings
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        return TowerInput(kind="image", grid=grid, rows=rows)
