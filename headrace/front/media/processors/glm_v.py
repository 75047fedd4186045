"""GLM-4.1V, 4.5V and 4.6V: pictures to patches, and videos as pairs of frames before their times.

As transformers 5.23 (image_processing_pil_glm4v.py, video_processing_glm4v.py,
video_processing_glm46v.py, processing_glm4v.py, processing_glm46v.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.front.media.processing import MAX_PATCHES, ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.qwen_vl import VIDEO_ROWS, QwenVisionProcessor

RATES = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))
"""Of GLM-4.6V: pairs of frames a second, of videos up to so many seconds."""
LONGEST_S = 2400.0
MOST_FRAMES = 640


class GlmVisionProcessor(QwenVisionProcessor):
    """An image counts as `temporal` frames within its bounds, and what is smaller than a window is
    made larger first."""

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """See QwenVisionProcessor."""
        least, most = self._settings.image_pixels
        most = min(most, self._settings.temporal * MAX_PATCHES * self._settings.patch**2)
        return self._size(self._settings.temporal, height, width, least, most)

    def video_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """The same for all frames of a video together."""
        return self._size(num_frames, height, width, *self._settings.video_pixels)

    def _size(
        self, num_frames: int, height: int, width: int, least: int, most: int
    ) -> tuple[int, int]:
        scale = max(self._factor / height, self._factor / width)
        if scale > 1:
            height, width = int(height * scale), int(width * scale)
        temporal = self._settings.temporal
        bounded = round(num_frames / temporal) * temporal
        return self._fitted(num_frames, height, width, least, most, bounded=bounded)

    def frames_of(self, video: Sampling) -> list[int]:
        """So many a second; of longer videos so many in all. An even number."""
        settings, last = self._settings, video.num_frames - 1
        duration = video.num_frames / video.rate
        if duration <= settings.max_duration_s:
            count = max(math.floor(duration * settings.fps), 1)
            taken = [min(last, math.ceil(i * video.rate / settings.fps)) for i in range(count)]
        else:
            count = int(settings.max_duration_s * settings.fps)
            seconds = np.linspace(0, duration, count)
            taken = [min(last, math.ceil(second * video.rate)) for second in seconds.tolist()]
            if count >= video.num_frames:
                taken = list(range(video.num_frames))
        return self._even(taken)

    def _even(self, taken: list[int]) -> list[int]:
        taken = list(dict.fromkeys(taken))
        return [*taken, *taken[-1:]] if len(taken) % 2 else taken

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """An input for each pair of frames, whose time stands behind it."""
        temporal = self._settings.temporal
        channels = self._frame_channels(frames, len(indices))
        channels += [channels[-1]] * (-len(indices) % temporal)
        inputs = list[TowerInput]()
        layout = list[str | int]()
        for i in range(0, len(channels), temporal):
            grid, rows = self._patches(np.stack(channels[i : i + temporal]))
            layout += ["<|begin_of_image|>", len(inputs)]
            layout += ["<|end_of_image|>" + self._stamp(indices[i] / video.rate)]
            inputs.append(TowerInput(kind=VIDEO_ROWS, grid=grid, rows=rows))
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(layout))

    def _stamp(self, time_s: float) -> str:
        return str(int(time_s))


class Glm46VisionProcessor(GlmVisionProcessor):
    """GLM-4.6V: the longer a video, the fewer frames a second; times to a tenth."""

    def frames_of(self, video: Sampling) -> list[int]:
        """See GlmVisionProcessor."""
        total, temporal = video.num_frames, self._settings.temporal
        duration = video.num_frames / video.rate
        lasting = min(duration, LONGEST_S)
        rate = next(rate for most, rate in RATES if lasting <= most)
        count = min(int(lasting * rate * temporal), MOST_FRAMES)
        if total < count:
            return self._even(np.linspace(0, total - 1, count, dtype=int).tolist())
        taken = self._at_rate(video, rate * temporal, int(duration))
        if len(taken) < count:
            first, last = (taken[0], taken[-1]) if taken else (0, max(total - 1, 0))
            taken = np.linspace(first, last, count, dtype=int).tolist()
        elif len(taken) > count:
            taken = np.linspace(0, total - 1, count, dtype=int).tolist()
        return self._even(taken)

    def _at_rate(self, video: Sampling, rate: float, until_s: int) -> list[int]:
        """The first frame of each step of time, up to so many seconds."""
        taken, second = list[int](), 0.0
        for index in range(video.num_frames):
            if index * (1 / video.rate) >= second:
                second += 1 / rate
                taken.append(index)
                if second >= until_s:
                    break
        return taken

    def _stamp(self, time_s: float) -> str:
        return f"{time_s:.1f} seconds"
