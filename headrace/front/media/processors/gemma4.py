"""Gemma 4: images and frames of their own ratio, as large as so many tokens allow.

As transformers 5.23 (image_processing_pil_gemma4.py, video_processing_gemma4.py,
processing_gemma4.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class Gemma4Processor(SquareProcessor):
    """See `Processor`."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input between the image's two marks."""
        before, behind = self._settings.around
        layout = (*((before,) if before else ()), 0, *((behind,) if behind else ()))
        one = self._input(picture, self._settings.image_pixels[1])
        return ProcessedMedia(inputs=(one,), layout=layout)

    def frames_of(self, video: Sampling) -> list[int]:
        """So many in equal steps from the first on."""
        count = min(self._settings.max_frames, video.num_frames)
        return [i * video.num_frames // count for i in range(count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """An image for each frame, behind its time in minutes and seconds."""
        before, behind = self._settings.around
        inputs = tuple(self._input(frame, self._settings.video_pixels[1]) for frame in frames)
        layout = list[str | int]()
        end = ""
        for number, index in enumerate(indices):
            minutes, seconds = divmod(int(index / video.rate), 60)
            layout += [f"{end}{minutes:02d}:{seconds:02d} {before}", number]
            end = f"{behind} "
        return ProcessedMedia(inputs=inputs, layout=(*layout, *((behind,) if behind else ())))

    def _input(self, picture: Image.Image, most: int) -> TowerInput:
        settings = self._settings
        height, width = self._size(picture.height, picture.width, most)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        grid, rows = patches_of(channels_of(picture)[None], settings.patch, merge=settings.merge)
        return TowerInput(kind="image", grid=grid, rows=rows)

    def _size(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The largest with whole windows within the bound of pixels; a side that would have none
        gets one, and the other what the ratio gives it."""
        settings = self._settings
        unit = settings.patch * settings.merge
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
