"""Step-3 and Step 3.7: windows of a picture, whose size follows its ratio, and the whole picture
behind them.

As transformers 5.23 (image_processing_step3p7.py, processing_step3p7.py), and as vLLM has Step-3's.
"""

from __future__ import annotations

from PIL import Image

from headrace.front.media.picture import resized
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.square import SquareProcessor

NARROW = 32
"""Pixels of a side below which a picture of more than FAR to one becomes a square."""
FAR = 4.0
LONG = 1.5
"""The ratio from which on a small picture is cut."""
REST = 0.2
"""The share of a window from which on what is left over gets a window too."""


class StepProcessor(SquareProcessor):
    """See `Processor`. It has no video. `sizes`: the one of a window's square."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The windows row by row, then the whole."""
        side, tile = self._settings.side, self._settings.sizes[0][0]
        picture, width, height = self._bounded(picture)
        whole = self._at(self._at(picture, width, height), side, side)
        window = self.window(width, height)
        squares, layout = list[Image.Image](), list[str | int]()
        if window:
            wide, high = _snapped(width, window), _snapped(height, window)
            large = self._at(picture, wide, high)
            columns, rows = max(1, wide // window), max(1, high // window)
            for y in range(rows):
                for x in range(columns):
                    right, below = min((x + 1) * window, wide), min((y + 1) * window, high)
                    part = large.crop((x * window, y * window, right, below))
                    layout += ["<patch_start>", len(squares), "<patch_end>"]
                    squares.append(self._at(part, tile, tile))
                if y < rows - 1:
                    layout.append("<patch_newline>")
        layout += ["<im_start>", len(squares), "<im_end>"]
        inputs = tuple(self.input_of(square) for square in (*squares, whole))
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))

    def window(self, width: int, height: int) -> int:
        """Pixels of a window's side; 0: the picture is not cut."""
        return _window(width, height, self._settings.side, self._settings.sizes[0][0])

    def _bounded(self, picture: Image.Image) -> tuple[Image.Image, int, int]:
        """The picture, a square where it is narrow, and the size at which it is cut."""
        width, height = picture.size
        if min(width, height) < NARROW and max(width / height, height / width) > FAR:
            side = max(width, height)
            ground = Image.new("RGB", (side, side))
            ground.paste(picture, (0, 0))
            picture, width, height = ground, side, side
        longest = self._settings.longest
        if max(width, height) > longest:
            scale = longest / max(height, width)
            width, height = int(width * scale), int(height * scale)
        return picture, width, height

    def _at(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        resample = self._settings.resample
        return resized(picture, height=height, width=width, resample=resample)


class Step3Processor(StepProcessor):
    """Step-3's: a picture as long as the square is cut; one longer than `longest` becomes smaller
    first."""

    def window(self, width: int, height: int) -> int:
        """See StepProcessor."""
        return _window(width, height, self._settings.side - 1, self._settings.sizes[0][0])

    def _bounded(self, picture: Image.Image) -> tuple[Image.Image, int, int]:
        picture, width, height = super()._bounded(picture)
        return self._at(picture, width, height), width, height


def _window(width: int, height: int, side: int, tile: int) -> int:
    short, long = min(height, width), max(height, width)
    if long <= side:
        return short if long / short > LONG else 0
    return min(short, tile) if long / short > FAR else tile


def _snapped(pixels: int, window: int) -> int:
    if pixels < window:
        return pixels
    return window * (pixels // window + (pixels % window > REST * window))
