"""GLM-5.3: pictures keep their ratio, and stand in the upper left of a ground of whole windows.

As transformers 5.23 (image_processing_pil_glm5_next.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, resized
from headrace.front.media.processing import MAX_PATCHES, ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.qwen_vl import IMAGE_ROWS, QwenVisionProcessor


class GlmNextProcessor(QwenVisionProcessor):
    """See `Processor`: `image_pixels` are those of the least and of the most windows. It has no
    video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of grid (1, h, w)."""
        height, width = self.image_size(picture.height, picture.width)
        scale = min(height / picture.height, width / picture.width)
        if picture.height * picture.width >= self._settings.image_pixels[0]:
            scale = min(1.0, scale)
        high = max(1, min(height, math.floor(picture.height * scale)))
        wide = max(1, min(width, math.floor(picture.width * scale)))
        ground = Image.new("RGB", (width, height))
        ground.paste(resized(picture, height=high, width=wide), (0, 0))
        grid, rows = self._patches(channels_of(ground)[None])
        one = TowerInput(kind=IMAGE_ROWS, grid=grid, rows=rows)
        return ProcessedMedia(inputs=(one,), layout=(0,))

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Of the ground: whole windows, so many as there may be."""
        least, most = self._settings.image_pixels
        most = min(most, MAX_PATCHES * self._settings.patch**2)
        high, wide = self._whole(height), self._whole(width)
        if high * wide < least:
            scale = math.sqrt(least / (height * width))
            high, wide = (self._whole(max(1, math.ceil(side * scale))) for side in (height, width))
        return (high, wide) if high * wide <= most else self._within(height, width, most)

    def _whole(self, length: int) -> int:
        return math.ceil(length / self._factor) * self._factor

    def _within(self, height: int, width: int, most: int) -> tuple[int, int]:
        """That of the largest picture whose ground has no more pixels, found by halving."""
        low, top = 1, height
        best = (self._factor, self._factor)
        while low <= top:
            high = (low + top) // 2
            wide = max(1, math.floor(width * high / height))
            ground = self._whole(high), self._whole(wide)
            if ground[0] * ground[1] <= most:
                best, low = ground, high + 1
            else:
                top = high - 1
        return best

    def frames_of(self, video: Sampling) -> list[int]:
        raise InvalidRequest("this model's video is not read; images are")

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        raise InvalidRequest("this model's video is not read; images are")
