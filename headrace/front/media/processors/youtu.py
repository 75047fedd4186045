"""Youtu-VL: a picture at its own size, each side filled up to whole windows by stretching; one with
too many patches is made smaller by steps of a fiftieth.

As its authors' processor (tencent/Youtu-VL-4B-Instruct).
"""

from __future__ import annotations

import math

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor

STEP = 0.02


class YoutuProcessor(SquareProcessor):
    """See `Processor`: `tiles[1]` bounds the patches. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input, whose grid follows the size."""
        settings = self._settings
        height, width = self.size_of(picture.height, picture.width)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        return ProcessedMedia(inputs=(TowerInput(kind="image", grid=grid, rows=rows),), layout=(0,))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Pixels down and across."""
        patch, most = self._settings.patch, self._settings.tiles[1]
        window, scale = patch * self._settings.merge, 1.0
        while scale > -STEP:
            high, wide = (
                max(window, math.ceil(side * scale / window) * window) for side in (height, width)
            )
            if (high // patch) * (wide // patch) <= most:
                return high, wide
            scale -= STEP
        raise InvalidRequest(
            f"a picture takes {self._settings.merge**2} patches, at most {most} are allowed"
        )
