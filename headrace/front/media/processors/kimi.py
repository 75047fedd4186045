"""Kimi-K2.5: pictures of any size on a ground of whole windows, and videos as clips of a few frames
behind their times.

As transformers 5.23 (image_processing_kimi_k25.py, video_processing_kimi_k25.py,
processing_kimi_k25.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.square import SquareProcessor

SECONDS_OF_A_DAY = 86_400


class KimiProcessor(SquareProcessor):
    """See `Processor`. `longest`: patches of a side at most."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of the picture's own ratio."""
        channels = self._grounded(picture, self._settings.image_pixels[1])[None]
        return ProcessedMedia(inputs=(self._input("image", channels),), layout=(0,))

    def _input(self, kind: str, channels: np.ndarray) -> TowerInput:
        patch, merge = self._settings.patch, self._settings.merge
        grid, rows = patches_of(channels, patch, merge=merge)
        count = grid[1] * grid[2] // merge**2
        return TowerInput(kind=kind, grid=grid, rows=rows, num_tokens=count)

    def _grounded(self, picture: Image.Image, most_pixels: int) -> np.ndarray:
        """uint8 [3, H, W]: made smaller if need be, in the upper left of a black ground."""
        settings = self._settings
        unit = settings.patch * settings.merge
        longest = settings.longest * settings.patch
        most = most_pixels // settings.patch**2
        count = max(1, picture.height // settings.patch) * max(1, picture.width // settings.patch)
        scale = min(1.0, math.sqrt(most / count), longest / picture.height, longest / picture.width)
        height, width = (
            min(max(1, int(side * scale)), longest) for side in (picture.height, picture.width)
        )
        ground = np.zeros((3, -(-height // unit) * unit, -(-width // unit) * unit), np.uint8)
        small = resized(picture, height=height, width=width, resample=settings.resample)
        ground[:, :height, :width] = channels_of(small)
        return ground

    def frames_of(self, video: Sampling) -> list[int]:
        """So many a second."""
        settings = self._settings
        count = int(video.num_frames / video.rate * settings.fps)
        count = min(max(count, 1), settings.max_frames, video.num_frames)
        return [int(i * video.num_frames / count) for i in range(count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """An input for each clip, behind the time of its first frame."""
        settings, temporal = self._settings, self._settings.temporal
        channels = [self._grounded(frame, settings.video_pixels[1]) for frame in frames]
        inputs, layout = list[TowerInput](), list[str | int]()
        for first in range(0, len(channels), temporal):
            clip = np.stack(channels[first : first + temporal])
            clock = _clock(indices[first] / video.rate)
            layout += [f"{clock}<|media_begin|>video<|media_content|>", len(inputs)]
            layout += ["<|media_end|>"]
            inputs.append(self._input("video", clip))
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(layout))


def _clock(time_s: float) -> str:
    """Hours, minutes, seconds and thousandths."""
    minutes, seconds = divmod(int(time_s) % SECONDS_OF_A_DAY, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}.{int(time_s % 1 * 1000):03d}"
