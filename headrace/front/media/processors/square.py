"""Models whose images are squares of one size: LLaVA's one square, InternVL's tiles.

Sizes, tilings and crops are those of transformers 5.23 (image_processing_pil_llava.py,
image_processing_pil_got_ocr2.py, processing_internvl.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, Sampling, TowerInput

COVERED = 0.6


class SquareProcessor:
    """See `Processor`: an image is one square. It has no video."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of a fixed grid."""
        before, behind = self._settings.around
        layout = (*((before,) if before else ()), 0, *((behind,) if behind else ()))
        return ProcessedMedia(inputs=(self.input_of(self.fitted(picture)),), layout=layout)

    def fitted(self, picture: Image.Image) -> Image.Image:
        """The square: the middle of the picture, the whole of it on a ground, or stretched."""
        settings, side = self._settings, self._settings.side
        if settings.fit == "crop":
            return self._middle(picture)
        if settings.fit == "inside":
            return self._inside(picture)
        if settings.fit == "pad":
            longest = max(picture.size)
            ground = Image.new("RGB", (longest, longest), settings.pad_color)
            ground.paste(picture, ((longest - picture.width) // 2, (longest - picture.height) // 2))
            picture = ground
        return resized(picture, height=side, width=side, resample=settings.resample)

    def _inside(self, picture: Image.Image) -> Image.Image:
        settings, side = self._settings, self._settings.side
        scale = side / max(picture.size)
        width, height = (max(round(one * scale), settings.shortest) for one in picture.size)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        ground = Image.new("RGB", (side, side), settings.pad_color)
        ground.paste(picture, ((side - width) // 2, (side - height) // 2))
        return ground

    def _middle(self, picture: Image.Image) -> Image.Image:
        settings, side = self._settings, self._settings.side
        short, long = sorted(picture.size)
        new_long = int(side * long / short)
        if new_long > 64 * side:
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; one side may be at "
                "most 64 times the other"
            )
        wide = picture.width > picture.height
        width, height = (new_long, side) if wide else (side, new_long)
        picture = resized(picture, height=height, width=width, resample=settings.resample)
        left, top = (width - side) // 2, (height - side) // 2
        return picture.crop((left, top, left + side, top + side))

    def input_of(self, square: Image.Image) -> TowerInput:
        """An input of the tower."""
        settings = self._settings
        grid, rows = patches_of(channels_of(square)[None], settings.patch, merge=settings.merge)
        return TowerInput(kind="image", grid=grid, rows=rows, num_tokens=settings.rows_each)

    def frames_of(self, video: Sampling) -> list[int]:
        raise InvalidRequest("this model takes no video")

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        raise InvalidRequest("this model takes no video")


class TwoSquaresProcessor(SquareProcessor):
    """An image is a large square and a small one made of it, whose patches are one input's rows."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input of as many tokens as the small square has patches."""
        settings = self._settings
        large = self.fitted(picture)
        small_side = settings.sizes[0][0]
        small = resized(large, height=small_side, width=small_side, resample=settings.resample)
        parts = [self.input_of(square) for square in (large, small)]
        rows = np.concatenate([one.rows for one in parts])
        count = len(parts[1].rows)
        one = TowerInput(kind="image", grid=(1, 1, len(rows)), rows=rows, num_tokens=count)
        return ProcessedMedia(inputs=(one,), layout=(0,))


class TiledProcessor(SquareProcessor):
    """An image is cut into the tiling nearest to its ratio, and stands whole behind its tiles."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """An input for each tile, between the image's two marks."""
        settings, side = self._settings, self._settings.side
        columns, rows = self.tiles_of(picture)
        whole = resized(
            picture, height=rows * side, width=columns * side, resample=settings.resample
        )
        squares = [
            whole.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
            for y in range(rows)
            for x in range(columns)
        ]
        if len(squares) > 1:
            squares.append(resized(picture, height=side, width=side, resample=settings.resample))
        inputs = tuple(self.input_of(square) for square in squares)
        return ProcessedMedia(inputs=inputs, layout=("<img>", *range(len(inputs)), "</img>"))

    def tiles_of(self, picture: Image.Image) -> tuple[int, int]:
        """Columns and rows."""
        settings = self._settings
        return tiling(picture.width, picture.height, settings.tiles, settings.side)

    def frames_of(self, video: Sampling) -> list[int]:
        """The middle one of each of so many equal parts."""
        count = min(self._settings.max_frames, video.num_frames)
        step = video.num_frames / count
        return [min(int(step / 2 + i * step), video.num_frames - 1) for i in range(count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One square for each frame, behind its number."""
        side, resample = self._settings.side, self._settings.resample
        inputs = tuple(
            self.input_of(resized(frame, height=side, width=side, resample=resample))
            for frame in frames
        )
        layout = list[str | int]()
        for number in range(len(inputs)):
            layout += [f"{chr(10) * bool(number)}Frame{number + 1}: <img>", number, "</img>"]
        return ProcessedMedia(inputs=inputs, layout=tuple(layout))


class CoveringTilesProcessor(TiledProcessor):
    """Nemotron's: between ratio and size of a tiling the best, where six tenths of the picture's
    pixels are as good as all."""

    def tiles_of(self, picture: Image.Image) -> tuple[int, int]:
        """The first of the best among tilings of fewest tiles."""
        (least, most), side = self._settings.tiles, self._settings.side
        ratio, pixels = picture.width / picture.height, picture.width * picture.height
        counts = range(1, most + 1)
        choices = sorted(
            ((x, y) for x in counts for y in counts if least <= x * y <= most),
            key=lambda one: (one[0] * one[1], one),
        )

        def worth(one: tuple[int, int]) -> float:
            own = one[0] / one[1]
            covered = min(one[0] * one[1] * side**2 / pixels, COVERED)
            return covered * min(own / ratio, ratio / own)

        return max(choices, key=worth)


def tiling(
    width: int, height: int, bounds: tuple[int, int], side: int, *, longest: int = 256
) -> tuple[int, int]:
    """Columns and rows, `longest` of either at most: of all tilings within the bounds the one whose
    ratio is nearest; among equal ones the larger, as long as the picture fills more than half of
    it."""
    least, most = bounds
    counts = range(1, min(most, longest) + 1)
    choices = [(x, y) for x in counts for y in counts]
    choices = sorted((c for c in choices if least <= c[0] * c[1] <= most), key=np.prod)
    best, best_distance = (1, 1), float("inf")
    for choice in choices:
        distance = abs(width / height - choice[0] / choice[1])
        larger = width * height > 0.5 * side**2 * choice[0] * choice[1]
        if distance < best_distance or (distance == best_distance and larger):
            best, best_distance = choice, distance
    return best
