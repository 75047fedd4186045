"""Pixtral and Mistral 3: images of any size, a token of text behind each row of patches.

As transformers 5.23 (image_processing_pil_pixtral.py, processing_pixtral.py).
"""

from __future__ import annotations

import math

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class PixtralProcessor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of the picture's own ratio, its longest side bounded."""
        one = self._input(picture)
        return ProcessedMedia(inputs=(one,), layout=(0, "[IMG_END]"), row_break="[IMG_BREAK]")

    def _input(self, picture: Image.Image) -> TowerInput:
        settings = self._settings
        height, width = self._size(picture)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        return TowerInput(kind="image", grid=grid, rows=rows)

    def _size(self, picture: Image.Image) -> tuple[int, int]:
        settings = self._settings
        unit, height, width = settings.patch * settings.merge, picture.height, picture.width
        ratio = max(height, width) / settings.longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; one side may be at "
                f"most {settings.longest} times the other"
            )
        return -(-height // unit) * unit, -(-width // unit) * unit


class UnbrokenProcessor(PixtralProcessor):
    """LightOnOCR: the same without text behind rows (processing_lighton_ocr.py)."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """See PixtralProcessor."""
        return ProcessedMedia(inputs=(self._input(picture),), layout=(0,))
