"""SigLIP 2's images: any ratio, as many patches as are allowed (transformers 5.23,
image_processing_pil_siglip2.py)."""

from __future__ import annotations

import math

from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor

PRECISION = 1e-5
LARGEST_SCALE = 100.0


class Siglip2Processor(SquareProcessor):
    """See `Processor`: `tiles[1]` bounds the patches."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input, whose grid follows the ratio."""
        settings = self._settings
        height, width = fitted_size(
            picture.height, picture.width, patch=settings.patch, most=settings.tiles[1]
        )
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch)
        one = TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)
        return ProcessedMedia(inputs=(one,), layout=(0,))


def fitted_size(height: int, width: int, *, patch: int, most: int) -> tuple[int, int]:
    """Both sides scaled alike, each up to the next whole patch, so that at most `most` patches
    fit."""

    def sides(scale: float) -> tuple[int, int]:
        down, across = (
            max(patch, math.ceil(side * scale / patch) * patch) for side in (height, width)
        )
        return down, across

    low, high = PRECISION / 10, LARGEST_SCALE
    while high - low >= PRECISION:
        scale = (low + high) / 2
        down, across = sides(scale)
        if (down / patch) * (across / patch) <= most:
            low = scale
        else:
            high = scale
    return sides(low)
