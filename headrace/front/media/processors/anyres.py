"""LLaVA-NeXT, LLaVA-OneVision, Video-LLaVA and HyperCLOVA X SEED Vision: the whole picture as one
square, then its tiles, of which the part without padding is shown.

As its authors' processor (naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B), the others' as
transformers 5.23 (image_processing_pil_llava_next.py, image_processing_pil_llava_onevision.py,
processing_llava_next.py, processing_llava_onevision.py,
processing_llava_next_video.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaCut, Packing
from headrace.front.media.picture import channels_at, channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, Sampling, TowerInput
from headrace.front.media.processors.square import SquareProcessor


class AnyResolutionProcessor(SquareProcessor):
    """See `Processor`."""

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(settings)
        self._packing = Packing(newline=True, middle=True, most=settings.most_windows)
        self._ground = (0, 0, 0)

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """Two inputs: the whole, and the tiles; or the whole alone."""
        settings = self._settings
        if settings.most_cut and settings.tiles == (1, 1):
            whole = self._whole(self.fitted(picture), MediaCut(tail=True), "image")
            return ProcessedMedia(inputs=(whole,), layout=(0,))
        base = self.input_of(self.whole(picture))
        tiles = self._tiles(picture)
        inputs = (base,) if tiles is None else (base, tiles)
        return ProcessedMedia(inputs=inputs, layout=tuple(range(len(inputs))))

    def whole(self, picture: Image.Image) -> Image.Image:
        """The square before the tiles."""
        side = self._settings.side
        return resized(picture, height=side, width=side, resample=self._settings.resample)

    def _tiles(self, picture: Image.Image) -> TowerInput | None:
        """None: so narrow a picture fills no row, or column, of windows."""
        settings, side = self._settings, self._settings.side
        height, width = best_size(picture.height, picture.width, settings.sizes)
        ground = Image.new("RGB", (width, height), self._ground)
        high, wide = fitted_size(picture.height, picture.width, height, width)
        small = resized(picture, height=high, width=wide, resample=settings.resample)
        ground.paste(small, ((width - wide) // 2, (height - high) // 2))
        rows, columns = height // side, width // side
        channels = channels_of(ground).reshape(3, rows, side, columns, side)
        tiles = channels.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)
        windows = side // settings.patch // settings.merge
        high_windows, wide_windows = unpadded(
            picture.height, picture.width, windows * rows, windows * columns
        )
        if not high_windows or not wide_windows:
            return None
        cut = MediaCut(columns=columns, height=high_windows, width=wide_windows)
        return self._input(tiles, cut, "image")

    def _whole(self, square: Image.Image, cut: MediaCut, kind: str) -> TowerInput:
        return self._input(channels_of(square)[None], cut, kind)

    def _input(self, squares: np.ndarray, cut: MediaCut, kind: str) -> TowerInput:
        merge = self._settings.merge
        grid, rows = patches_of(squares, self._settings.patch, merge=merge)
        count = self._packing.num_rows(grid, merge, cut)
        return TowerInput(kind=kind, grid=grid, rows=rows, cut=cut, num_tokens=count)

    def frames_of(self, video: Sampling) -> list[int]:
        """So many in equal steps (the reference takes frames that were sampled before)."""
        most = self._settings.max_frames
        if not most:
            return super().frames_of(video)
        count = min(most, video.num_frames)
        return [int(i) for i in np.linspace(0, video.num_frames - 1, count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One input: a stretched square for each frame, a learned row behind them."""
        side, resample = self._settings.side, self._settings.resample
        squares = [
            channels_at(frame, height=side, width=side, resample=resample) for frame in frames
        ]
        grid, rows = patches_of(np.stack(squares), self._settings.patch)
        half = -(-grid[1] // 2)
        one = TowerInput(
            kind="video",
            grid=grid,
            rows=rows,
            cut=MediaCut(tail=True),
            num_tokens=len(squares) * half**2 + 1,
        )
        return ProcessedMedia(inputs=(one,), layout=(0,))


class PaddedProcessor(AnyResolutionProcessor):
    """HyperCLOVA X SEED Vision's: the whole and the tiles have a ground of the mean colour. It has
    no video."""

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(settings)
        self._ground = settings.pad_color

    def whole(self, picture: Image.Image) -> Image.Image:
        """In the middle of the square."""
        side = self._settings.side
        longest = max(picture.size)
        width, height = (math.ceil(one / longest * side) for one in picture.size)
        small = resized(picture, height=height, width=width, resample=self._settings.resample)
        ground = Image.new("RGB", (side, side), self._ground)
        ground.paste(small, ((side - width) // 2, (side - height) // 2))
        return ground

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """None."""
        raise InvalidRequest("this model takes no video")


class CroppedFramesProcessor(SquareProcessor):
    """Video-LLaVA's: the middle square of each frame is an input with a token more."""

    def frames_of(self, video: Sampling) -> list[int]:
        """So many in equal steps from the first on."""
        count = min(self._settings.max_frames, video.num_frames)
        return [i * video.num_frames // count for i in range(count)]

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One behind the other."""
        inputs = list[TowerInput]()
        for frame in frames:
            square = self.input_of(self.fitted(frame))
            count = len(square.rows) + self._settings.extra
            inputs.append(msgspec.structs.replace(square, kind="video", num_tokens=count))
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(range(len(inputs))))


class AveragedFramesProcessor(AnyResolutionProcessor):
    """LLaVA-NeXT-Video's: of a frame's square each 2 x 2 patches make one token."""

    def video(
        self, frames: Iterable[Image.Image], indices: Sequence[int], video: Sampling
    ) -> ProcessedMedia:
        """One input of all frames."""
        squares = np.stack([channels_of(self.fitted(frame)) for frame in frames])
        grid, rows = patches_of(squares, self._settings.patch, merge=2)
        one = TowerInput(kind="video", grid=grid, rows=rows, num_tokens=len(rows) // 4)
        return ProcessedMedia(inputs=(one,), layout=(0,))


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size that keeps most of a picture's pixels, among equal ones the one that wastes
    least."""

    def kept_and_wasted(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    best = max(sizes, key=kept_and_wasted)
    if not kept_and_wasted(best)[0]:
        raise InvalidRequest(
            f"a picture of {width} x {height} pixels given; nothing of it is left when it is "
            f"fitted into {best[1]} x {best[0]}"
        )
    return best


def fitted_size(height: int, width: int, most_high: int, most_wide: int) -> tuple[int, int]:
    """Height and width of the picture made as large as fits in."""
    across, down = most_wide / width, most_high / height
    if across < down:
        return min(math.ceil(height * across), most_high), most_wide
    return most_high, min(math.ceil(width * down), most_wide)


def unpadded(height: int, width: int, most_high: int, most_wide: int) -> tuple[int, int]:
    """Patches down and across that are not wholly padding, of so many."""
    if width / height > most_wide / most_high:
        high = int(round(height * (most_wide / width), 7))
        return most_high - (most_high - high) // 2 * 2, most_wide
    wide = int(round(width * (most_high / height), 7))
    return most_high, most_wide - (most_wide - wide) // 2 * 2
