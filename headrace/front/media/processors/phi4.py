"""Phi-4 multimodal: a picture as tiles that enlarge it least, filled up with white below or on the
right, and behind them the whole at the size of one.

As transformers 5.23 (image_processing_phi4_multimodal.py): the whole is made of the tiles' picture,
by bicubic interpolation that does not smooth; here its values are whole numbers, within one."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaCut
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor, tiling

LEAST_SIDE = 10
SLOPE = -0.75
"""Of the interpolation (Keys 1981)."""


class Phi4Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """Two inputs: the tiles, and the whole."""
        settings, side = self._settings, self._settings.side
        columns, rows = self._tiles(picture.width, picture.height)
        width, height = columns * side, rows * side
        small = self._fitted(picture, width, height)
        ground = Image.new("RGB", (width, height), (255, 255, 255))
        ground.paste(small, (0, 0))
        channels = channels_of(ground)
        blank_x, blank_y = (
            (whole - own) // settings.patch
            for whole, own in ((width, small.width), (height, small.height))
        )
        shown = np.ones((height // settings.patch, width // settings.patch), np.uint8)
        shown[len(shown) - blank_y :] = 0
        shown[:, shown.shape[1] - blank_x :] = 0
        cut = MediaCut(
            columns=columns,
            height=-(-int(shown[:, 0].sum()) // settings.merge),
            width=-(-int(shown[0].sum()) // settings.merge),
            tail=True,
        )
        tiles = self._input(
            cut_tiles(channels, rows, columns), cut_tiles(shown[None], rows, columns), cut
        )
        windows = side // settings.patch // settings.merge
        whole = self._input(
            shrunk(channels, side)[None],
            np.ones((1, 1, side // settings.patch, side // settings.patch), np.uint8),
            MediaCut(columns=1, height=windows, width=windows),
        )
        return ProcessedMedia(inputs=(tiles, whole), layout=(0, 1))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows."""
        settings = self._settings
        columns, rows = (math.ceil(one / settings.side) for one in (width, height))
        if columns * rows > settings.tiles[1]:
            return tiling(width, height, settings.tiles, settings.side)
        return columns, rows

    def _fitted(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        across, down = width / picture.width, height / picture.height
        if across < down:
            height = int(picture.height * across)
        else:
            width = int(picture.width * down)
        if min(width, height) < LEAST_SIDE:
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; its shorter side "
                f"would have {min(width, height)} of them, at least {LEAST_SIDE} are needed"
            )
        return resized(
            picture, height=height, width=width, resample=Image.Resampling.BILINEAR.value
        )

    def _input(
        self, tiles: npt.NDArray[np.uint8], shown: npt.NDArray[np.uint8], cut: MediaCut
    ) -> TowerInput:
        """`tiles` [T, 3, S, S], `shown` [T, 1, P, P]: whether each patch shows anything."""
        settings = self._settings
        grid, rows = patches_of(tiles, settings.patch, merge=settings.merge)
        flags = patches_of(shown, 1, merge=settings.merge, channels=1)[1]
        num_tokens = cut.height * (cut.width + 1) + cut.tail
        whole = np.ascontiguousarray(np.concatenate([rows, flags], axis=1))
        return TowerInput(kind="image", grid=grid, rows=whole, num_tokens=num_tokens, cut=cut)


def cut_tiles(channels: npt.NDArray[np.uint8], rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """[C, H, W] -> [T, C, S, S], row by row."""
    count, height, width = channels.shape
    tiles = channels.reshape(count, rows, height // rows, columns, width // columns)
    return tiles.transpose(1, 3, 0, 2, 4).reshape(-1, count, height // rows, width // columns)


def shrunk(channels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """[3, H, W] -> [3, S, S]."""
    _, height, width = channels.shape
    down, across = _weights(height, side), _weights(width, side)
    values = np.rint(down @ channels.astype(np.float32) @ across.T)
    whole: npt.NDArray[np.uint8] = values.clip(0, 255).astype(np.uint8)
    return whole


def _weights(length: int, side: int) -> npt.NDArray[np.float32]:
    """[S, length]: what each of S values takes of its four neighbours."""
    exact = (np.arange(side) + 0.5) * (length / side) - 0.5
    taps = np.floor(exact).astype(np.int64)[:, None] + np.arange(-1, 3)
    far = np.abs(exact[:, None] - taps)
    near = ((SLOPE + 2) * far - (SLOPE + 3)) * far**2 + 1
    wide = ((SLOPE * far - 5 * SLOPE) * far + 8 * SLOPE) * far - 4 * SLOPE
    weights = np.zeros((side, length), np.float32)
    at = (np.arange(side)[:, None], np.clip(taps, 0, length - 1))
    np.add.at(weights, at, np.where(far <= 1, near, wide).astype(np.float32))
    return weights
