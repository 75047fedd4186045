"""Donut's and Nougat's pictures of pages: made to fit into one rectangle, and filled up with black.

Sizes and order are those of transformers 5.23 (image_processing_pil_donut.py,
image_processing_pil_nougat.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, Sampling, TowerInput

INK = 200
"""Of a grey, stretched to 0 to 255, below which it is no margin."""


class DonutProcessor:
    """See `Processor`. It has no video."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of a fixed grid."""
        settings = self._settings
        grid, rows = patches_of(channels_of(self.fitted(picture))[None], settings.patch)
        one = TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)
        return ProcessedMedia(inputs=(one,), layout=(0,))

    def fitted(self, picture: Image.Image) -> Image.Image:
        """The picture in the middle of the rectangle."""
        settings = self._settings
        height, width = settings.sizes[0]
        if settings.trimmed:
            picture = without_margins(picture)
        if settings.turned and (picture.width - picture.height) * (width - height) < 0:
            picture = picture.transpose(Image.Transpose.ROTATE_270)
        picture = self._within(self._shortest(picture, min(height, width)), height, width)
        ground = Image.new("RGB", (width, height))
        ground.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
        return ground

    def _shortest(self, picture: Image.Image, side: int) -> Image.Image:
        """Its shorter side of so many pixels."""
        short, long = sorted(picture.size)
        longest = int(side * long / short)
        if longest > 64 * side:
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; one side may be at "
                "most 64 times the other"
            )
        wide = picture.width > picture.height
        height, width = (side, longest) if wide else (longest, side)
        return resized(picture, height=height, width=width, resample=self._settings.resample)

    def _within(self, picture: Image.Image, most_height: int, most_width: int) -> Image.Image:
        """Made smaller until neither side is longer."""
        height, width = min(picture.height, most_height), min(picture.width, most_width)
        if (width, height) == picture.size:
            return picture
        if picture.height > picture.width:
            width = int(picture.width * height / picture.height)
        elif picture.width > picture.height:
            height = int(picture.height * width / picture.width)
        return self.smaller(picture, max(1, width), max(1, height))

    def smaller(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        """The picture at this size, which is smaller."""
        return resized(picture, height=height, width=width, resample=self._settings.resample)

    def frames_of(self, video: Sampling) -> list[int]:
        """See Processor."""
        raise InvalidRequest("this model takes no video")

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """See Processor."""
        raise InvalidRequest("this model takes no video")


class NougatProcessor(DonutProcessor):
    """The same, made smaller in another way."""

    def smaller(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        """See DonutProcessor."""
        bicubic = Image.Resampling.BICUBIC
        return picture.resize((width, height), bicubic, reducing_gap=2.0)


def without_margins(picture: Image.Image) -> Image.Image:
    """What of a page has ink."""
    greys = np.asarray(picture.convert("L"))
    low, high = int(greys.min()), int(greys.max())
    if low == high:
        return picture
    ink = (greys.astype(np.float64) - low) / (high - low) * 255 < INK
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return picture.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
