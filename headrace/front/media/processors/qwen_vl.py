"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures to patches.

Sizes, sampling and the order of patches are those of transformers 5.23
(image_processing_pil_qwen2_vl.py, video_processing_qwen2_vl.py, video_processing_qwen3_vl.py,
processing_qwen3_vl.py). Both sides become multiples of patch * merge; patches follow each other in
windows of merge * merge, so that a window's patches become one token. A row is
[channel, frame, y, x]; of an image [channel, y, x].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_at, patches_of
from headrace.front.media.processing import (
    MAX_PATCHES,
    ProcessedMedia,
    Sampling,
    TowerInput,
)
from headrace.front.media.processors.pruning import with_kept

MAX_RATIO = 200
IMAGE_ROWS = "image"
VIDEO_ROWS = "video"
FRAME_MARKS = ("<|vision_start|>", "<|vision_end|>")


class QwenVisionProcessor:
    """See `Processor`."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings
        self._factor = settings.patch * settings.merge

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of grid (1, h, w), between the image's marks if there are any."""
        height, width = self.image_size(picture.height, picture.width)
        channels = channels_at(picture, height=height, width=width)
        grid, rows = self._patches(channels[None])
        one = TowerInput(kind=IMAGE_ROWS, grid=grid, rows=rows)
        before, behind = self._settings.around
        layout = (*((before,) if before else ()), 0, *((behind,) if behind else ()))
        return ProcessedMedia(inputs=(one,), layout=layout)

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the resized image: multiples of the factor, within the bounds, and
        nearly of the same ratio."""
        least, most = self._settings.image_pixels
        most = min(most, MAX_PATCHES * self._settings.patch**2)
        return self._fitted(1, height, width, least, most)

    def video_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """The same for each of so many frames. An input has at most MAX_PATCHES patches, by which
        long videos of one input are made smaller."""
        settings = self._settings
        least, most = settings.video_pixels
        pairs = -(-num_frames // settings.temporal)
        if settings.pixels_of_all_frames:
            low = max(self._factor / height, self._factor / width)
            if low > 1:
                height, width = int(height * low), int(width * low)
            bounded = max(1, round(num_frames / settings.temporal)) * settings.temporal
            height, width = self._fitted(num_frames, height, width, least, most, bounded=bounded)
            return height, width
        most = min(most, MAX_PATCHES // pairs * settings.patch**2)
        return self._fitted(1, height, width, min(least, most), most)

    def frames_of(self, video: Sampling) -> list[int]:
        """So many frames a second, at least and at most so many."""
        settings, total = self._settings, video.num_frames
        wanted = total / video.rate * settings.fps
        if settings.stamped:
            count = min(max(int(wanted), settings.min_frames), settings.max_frames, total)
            return [int(i) for i in np.linspace(0, total - 1, count).round()]
        most = min(settings.max_frames, total) // settings.temporal * settings.temporal
        bounded = min(max(wanted, settings.min_frames), max(most, 1), total)
        even = math.floor(bounded / settings.temporal) * settings.temporal or 1
        return [int(i * total / even) for i in range(even)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One input for all frames, or one for each pair behind its time."""
        settings, temporal = self._settings, self._settings.temporal
        channels = self._frame_channels(frames, len(indices))
        padding = -len(indices) % temporal
        channels += [channels[-1]] * padding
        if not settings.stamped:
            grid, rows = self._patches(np.stack(channels))
            step_s = temporal * video.num_frames / (video.rate * len(indices))
            one = TowerInput(kind=VIDEO_ROWS, grid=grid, rows=rows, step_s=step_s)
            return ProcessedMedia(inputs=with_kept([one], settings), layout=(0,))
        times = [index / video.rate for index in [*indices, *[indices[-1]] * padding]]
        inputs = list[TowerInput]()
        layout = list[str | int]()
        begin, end = settings.marks or FRAME_MARKS
        for i in range(0, len(channels), temporal):
            grid, rows = self._patches(np.stack(channels[i : i + temporal]))
            time_s = (times[i] + times[i + temporal - 1]) / 2
            layout += [f"<{time_s:.1f} seconds>{begin}", len(inputs), end]
            inputs.append(TowerInput(kind=VIDEO_ROWS, grid=grid, rows=rows))
        return ProcessedMedia(inputs=with_kept(inputs, settings), layout=tuple(layout))

    def _frame_channels(self, frames: Iterable[Image.Image], count: int) -> list[np.ndarray]:
        channels: list[np.ndarray] = []
        size: tuple[int, int] | None = None
        for frame in frames:
            height, width = size = size or self.video_size(count, frame.height, frame.width)
            channels.append(channels_at(frame, height=height, width=width))
        assert len(channels) == count, (len(channels), count)
        return channels

    def _fitted(
        self,
        num_frames: int,
        height: int,
        width: int,
        least: int,
        most: int,
        *,
        bounded: int = 1,
    ) -> tuple[int, int]:
        """`smart_resize` of the reference; `bounded`: the frames by which a result is measured."""
        ratio, factor = max(height, width) / min(height, width), self._factor
        if ratio > MAX_RATIO:
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels given; one side may be at most "
                f"{MAX_RATIO} times the other"
            )
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        pixels = num_frames * height * width
        if bounded * high * wide > most:
            scale = math.sqrt(pixels / most)
            high = max(factor, math.floor(height / scale / factor) * factor)
            wide = max(factor, math.floor(width / scale / factor) * factor)
        elif bounded * high * wide < least:
            scale = math.sqrt(least / pixels)
            high = math.ceil(height * scale / factor) * factor
            wide = math.ceil(width * scale / factor) * factor
        return high, wide

    def _patches(self, channels: np.ndarray) -> tuple[tuple[int, int, int], np.ndarray]:
        """Grid and rows of frames [F, 3, H, W]: one frame is an image's, more are whole groups."""
        settings = self._settings
        depth = 1 if len(channels) == 1 else settings.temporal
        return patches_of(channels, settings.patch, merge=settings.merge, depth=depth)
