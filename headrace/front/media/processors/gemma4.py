"""Gemma 4: images of their own ratio, as large as so many tokens allow.

As transformers 5.23 (image_processing_pil_gemma4.py, processing_gemma4.py).
"""

from __future__ import annotations

import math

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class Gemma4Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input between the image's two marks."""
        settings = self._settings
        height, width = self._size(picture.height, picture.width)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        one = TowerInput(kind="image", grid=grid, rows=rows)
        before, behind = settings.around
        layout = (*((before,) if before else ()), 0, *((behind,) if behind else ()))
        return ProcessedMedia(inputs=(one,), layout=layout)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The largest with whole windows within the bound of pixels; a side that would have none
        gets one, and the other what the ratio gives it."""
        settings = self._settings
        unit, most = settings.patch * settings.merge, settings.image_pixels[1]
        scale = math.sqrt(most / (height * width))
        high, wide = (int(scale * side / unit) * unit for side in (height, width))
        longest = most // unit**2 * unit
        if not high and not wide:
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels given; this model's images have at least "
                f"{unit} x {unit}"
            )
        if not high:
            return unit, min(width // height * unit, longest)
        if not wide:
            return min(height // width * unit, longest), unit
        return high, wide
