"""Idefics 3 and SmolVLM: tiles with their places as text, and the whole image behind them; of
SmolVLM's video the whole of each frame, behind its time.

As transformers 5.23 (image_processing_pil_idefics3.py, processing_idefics3.py,
video_processing_smolvlm.py, processing_smolvlm.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia, Sampling
from headrace.front.media.processors.square import SquareProcessor

MOST_PIXELS = 4096
"""Of a side."""
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"
SKIPPED_S = 1
"""At both ends of a video that is long enough."""
BELOW_TWENTY = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Idefics3Processor(SquareProcessor):
    """See `Processor`. Where it has video, `max_frames` and `fps` say so."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The tiles row by row, then the whole."""
        settings, side = self._settings, self._settings.side
        height, width = _bounded(picture.height, picture.width, settings.longest)
        picture = self._at(picture, height, width)
        if settings.tiles[1] == 1:  # not cut
            one = self.input_of(self._at(picture, side, side))
            return ProcessedMedia(inputs=(one,), layout=(AROUND + WHOLE, 0, AROUND))
        height, width = _whole_tiles(height, width, side)
        picture = self._at(picture, height, width)
        rows, columns = height // side, width // side
        if rows * columns == 1:
            return ProcessedMedia(
                inputs=(self.input_of(picture),), layout=(AROUND + WHOLE, 0, AROUND)
            )
        squares = list[Image.Image]()
        layout = list[str | int]()
        before = ""
        for y in range(rows):
            for x in range(columns):
                box = (x * side, y * side, (x + 1) * side, (y + 1) * side)
                layout += [f"{before}{AROUND}<row_{y + 1}_col_{x + 1}>", len(squares)]
                squares.append(picture.crop(box))
                before = ""
            before = "\n"
        layout += ["\n\n" + AROUND + WHOLE, len(squares), AROUND]
        squares.append(self._at(picture, side, side))
        inputs = tuple(self.input_of(square) for square in squares)
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def frames_of(self, video: Sampling) -> list[int]:
        """So many a second in equal steps, without the first and the last second of a video that
        has frames enough without."""
        settings, last = self._settings, video.num_frames - 1
        if not settings.max_frames:
            return super().frames_of(video)
        duration_s = video.num_frames / video.rate
        count = max(1, min(round(settings.fps * duration_s), settings.max_frames))
        first, end = 0, last
        if duration_s - 2 * SKIPPED_S > settings.max_frames * settings.fps:
            first = int(SKIPPED_S * video.rate)
            end = min(int(video.num_frames - SKIPPED_S * video.rate), last)
        if first >= end:
            first, end = 0, last
        return [int(i) for i in np.unique(np.linspace(first, end, count, dtype=int))]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """A square for each frame, made as large as a video's first, then as a tile."""
        settings, side = self._settings, self._settings.side
        squares = list[Image.Image]()
        for frame in frames:
            height, width = _bounded(frame.height, frame.width, settings.sizes[0][0])
            squares.append(self._at(self._at(frame, height, width), side, side))
        duration_s = int(video.num_frames / video.rate)
        (hours, minutes), seconds = divmod(duration_s // 60, 60), duration_s % 60
        end = (
            f"You are provided the following series of {number_words(len(squares))} frames from a "
            f"{hours}:{minutes:02d}:{seconds:02d} [H:MM:SS] video.\n"
        )
        layout = list[str | int]()
        for number, index in enumerate(indices):
            minutes, seconds = divmod(int(index / video.rate), 60)
            layout += [f"{end}\nFrame from {minutes:02d}:{seconds:02d}:{AROUND}{WHOLE}", number]
            end = AROUND
        inputs = tuple(self.input_of(square) for square in squares)
        return ProcessedMedia(inputs=inputs, layout=(*layout, f"{AROUND}\n\n"))

    def _at(self, picture: Image.Image, height: int, width: int) -> Image.Image:
        resample = self._settings.resample
        return resized(picture, height=height, width=width, resample=resample)


def _bounded(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side as long as it may be, the other one even, both at most MOST_PIXELS."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MOST_PIXELS:
        width, height = MOST_PIXELS, int(MOST_PIXELS / ratio)
    elif height > width and height > MOST_PIXELS:
        height, width = MOST_PIXELS, int(MOST_PIXELS * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Multiples of a tile's side, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return height, width


def number_words(number: int) -> str:
    """A number below a thousand in English words, as num2words writes them."""
    hundreds, rest = divmod(number, 100)
    if rest < 20:
        words = BELOW_TWENTY[rest]
    else:
        tens, ones = divmod(rest, 10)
        words = TENS[tens - 2] + (f"-{BELOW_TWENTY[ones]}" if ones else "")
    if not hundreds:
        return words
    return f"{BELOW_TWENTY[hundreds]} hundred" + (f" and {words}" if rest else "")
