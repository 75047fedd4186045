"""Nemotron Nano VL's and Omni's images: any ratio, as many patches as there are within bounds.

As transformers 5.23 (image_processing_nemotron_h_omni.py), but for bicubic values beyond black and
white, which Pillow bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class RadioProcessor(SquareProcessor):
    """See `Processor`: `tiles` bounds the patches. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input between its marks."""
        settings, (before, behind) = self._settings, self._settings.around
        high, wide = self._grid(picture)
        picture = resized(
            picture,
            height=high * settings.patch,
            width=wide * settings.patch,
            resample=settings.resample,
        )
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        one = TowerInput(kind="image", grid=grid, rows=rows)
        return ProcessedMedia(inputs=(one,), layout=(before, 0, behind))

    def _grid(self, picture: Image.Image) -> tuple[int, int]:
        """Patches down and across: nearly the picture's own, scaled into the bounds."""
        settings, (least, most) = self._settings, self._settings.tiles
        high, wide = (round(one / settings.patch + 0.5) for one in (picture.height, picture.width))
        factor = min(math.sqrt(most / (high * wide)), 1.0)
        high, wide = math.floor(factor * high), math.floor(factor * wide)
        if most > least and high * wide < least:
            factor = math.sqrt(least / max(high * wide, 1))
            high, wide = math.ceil(factor * high), math.ceil(factor * wide)
        high = _whole(high, settings.merge, fits=lambda one: one * wide <= most)
        return high, _whole(wide, settings.merge, fits=lambda one: high * one <= most)


def _whole(count: int, merge: int, *, fits: Callable[[int], bool]) -> int:
    """The next multiple, or the one before it where that does not fit."""
    rest = count % merge
    if not rest:
        return max(count, merge)
    up = count + merge - rest
    return up if fits(up) else max(merge, count - rest)
