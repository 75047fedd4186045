"""Ovis 2.5 and 2.6: pictures and frames of any size, in windows of patches, with a token more on
either side (Lu et al. 2025; the processor of its published checkpoints)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_at, patches_of
from headrace.front.media.processing import MAX_PATCHES, ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.square import SquareProcessor

MAX_RATIO = 200


class Ovis25Processor(SquareProcessor):
    """See `Processor`."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input."""
        return self._input("image", [self._channels(picture, 1)])

    def frames_of(self, video: Sampling) -> list[int]:
        """So many in equal steps (the reference takes frames that were sampled before)."""
        count = min(self._settings.max_frames, video.num_frames)
        return [int(i) for i in np.linspace(0, video.num_frames - 1, count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One input of all frames."""
        return self._input("video", [self._channels(frame, len(indices)) for frame in frames])

    def _channels(self, picture: Image.Image, count: int) -> np.ndarray:
        most = min(self._settings.image_pixels[1], MAX_PATCHES // count * self._settings.patch**2)
        height, width = self._size(picture.height, picture.width, most)
        resample = self._settings.resample
        return channels_at(picture, height=height, width=width, resample=resample)

    def _input(self, kind: str, channels: Sequence[np.ndarray]) -> ProcessedMedia:
        settings = self._settings
        grid, rows = patches_of(np.stack(channels), settings.patch, merge=settings.merge)
        count = len(rows) // settings.merge**2 + settings.extra
        one = TowerInput(kind=kind, grid=grid, rows=rows, num_tokens=count)
        return ProcessedMedia(inputs=(one,), layout=(0,))

    def _size(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Multiples of a window within the bounds, nearly of the same ratio. What is smaller than a
        window is made as large first; else a side counts as at most 200 times the other."""
        factor, least = self._settings.patch * self._settings.merge, self._settings.image_pixels[0]
        least = min(least, most)
        shown = f"a picture of {width} x {height} pixels given"
        if min(height, width) < factor:
            if height < width:
                height, width = factor, round(factor / height * width)
            else:
                height, width = round(factor / width * height), factor
        elif height > MAX_RATIO * width:
            height = MAX_RATIO * width
        elif width > MAX_RATIO * height:
            width = MAX_RATIO * height
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > most:
            scale = math.sqrt(height * width / most)
            high, wide = (math.floor(one / scale / factor) * factor for one in (height, width))
        elif high * wide < least:
            scale = math.sqrt(least / (height * width))
            high, wide = (math.ceil(one * scale / factor) * factor for one in (height, width))
        if not high or not wide:
            raise InvalidRequest(f"{shown}; made small enough it has less than {factor} in a side")
        return high, wide
