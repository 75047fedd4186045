"""Pictures that keep their ratio, between a least and a greatest side: Idefics 2, Aria and Fuyu.

As transformers 5.23 (image_processing_pil_idefics2.py, processing_idefics2.py,
image_processing_pil_aria.py, processing_aria.py, image_processing_pil_fuyu.py, processing_fuyu.py).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor

PADDING = 1
"""Of 255: the reference pads with 1.0 before it rescales."""


class Idefics2Processor(SquareProcessor):
    """See `Processor`. `shortest`, `longest`: pixels of a side; `tiles`: 5 where a picture is cut
    into its quarters; `marks`: what stands around each of them and the whole."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The quarters, then the whole, which share the mark between them."""
        settings, (mark,) = self._settings, self._settings.marks
        parts = [picture]
        if settings.tiles[1] > 1:
            width, height = picture.size
            if min(width, height) < 2:
                raise InvalidRequest(f"{width} x {height} pixels given; quarters need 2 x 2")
            middle, half = width // 2, height // 2
            boxes = (
                *((0, 0, middle, half), (middle, 0, width, half)),
                *((0, half, middle, height), (middle, half, width, height)),
            )
            parts = [*(picture.crop(box) for box in boxes), picture]
        layout = [piece for number in range(len(parts)) for piece in (mark, number)]
        inputs = tuple(self._input(part) for part in parts)
        return ProcessedMedia(inputs=inputs, layout=(*layout, mark))

    def _input(self, picture: Image.Image) -> TowerInput:
        """Patches that are not whole are left out."""
        settings, (width, height) = self._settings, picture.size
        ratio = width / height
        if width >= height and width > settings.longest:
            width, height = settings.longest, int(settings.longest / ratio)
        elif height > width and height > settings.longest:
            width, height = int(settings.longest * ratio), settings.longest
        height, width = (max(side, settings.shortest) for side in (height, width))
        small = resized(picture, height=height, width=width, resample=settings.resample)
        patch = settings.patch
        whole = channels_of(small)[:, : height // patch * patch, : width // patch * patch]
        grid, rows = patches_of(whole[None], patch)
        return TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)


class AriaProcessor(SquareProcessor):
    """See `Processor`. `side`: pixels of the longer side; `shortest`: of the other at least."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input in the upper left of black patches."""
        settings, side = self._settings, self._settings.side
        scale = side / max(picture.size)
        width, height = (max(int(one * scale), settings.shortest) for one in picture.size)
        if picture.width >= picture.height:
            width = side
        else:
            height = side
        small = resized(picture, height=height, width=width, resample=settings.resample)
        patch = settings.patch
        ground = np.zeros((3, -(-height // patch) * patch, -(-width // patch) * patch), np.uint8)
        ground[:, :height, :width] = channels_of(small)
        grid, rows = patches_of(ground[None], patch)
        one = TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)
        return ProcessedMedia(inputs=(one,), layout=(0,))


class FuyuProcessor(SquareProcessor):
    """See `Processor`. `sizes`: height and width that a larger picture is made to fit; `marks`:
    behind each row of patches, and behind all."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input in the upper left of patches that are almost black."""
        settings, ((most_height, most_width),) = self._settings, self._settings.sizes
        width, height = picture.size
        if width > most_width or height > most_height:
            scale = min(most_height / height, most_width / width)
            height, width = max(1, int(height * scale)), max(1, int(width * scale))
        small = resized(picture, height=height, width=width, resample=settings.resample)
        patch, (line, end) = settings.patch, settings.marks
        shape = (3, -(-height // patch) * patch, -(-width // patch) * patch)
        ground = np.full(shape, PADDING, np.uint8)
        ground[:, :height, :width] = channels_of(small)
        grid, rows = patches_of(ground[None], patch)
        one = TowerInput(kind="image", grid=grid, rows=rows)
        return ProcessedMedia(inputs=(one,), layout=(0, line + end), row_break=line)
