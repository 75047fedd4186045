"""DeepSeek-VL2: the whole picture in a grey square, then in the rectangle of such squares that
keeps most of it, cut into them.

As its authors' processor (deepseek-ai/DeepSeek-VL2): of a square's pixels those of whole patches
are seen; black patches fill it up to whole windows, which the tower leaves out.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaCut
from headrace.front.media.picture import channels_of, patches_of
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.anyres import best_size
from headrace.front.media.processors.square import SquareProcessor


class DeepseekVl2Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """Two inputs: the whole, and the tiles."""
        settings, side = self._settings, self._settings.side
        if not all(fitted_pixels(picture, side, side)):
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; one side may be at "
                f"most {side} times the other"
            )
        sizes = settings.sizes if settings.tiles[1] > 1 else ((side, side),)
        height, width = best_size(picture.height, picture.width, sizes)
        whole = self._input(picture, side, side, tail=True)
        return ProcessedMedia(inputs=(whole, self._input(picture, height, width)), layout=(0, 1))

    def _input(
        self, picture: Image.Image, height: int, width: int, *, tail: bool = False
    ) -> TowerInput:
        """The picture in the middle of a ground of this size, its tiles row by row."""
        settings, side = self._settings, self._settings.side
        ground = ImageOps.pad(
            picture,
            (width, height),
            method=Image.Resampling(settings.resample),
            color=settings.pad_color,
        )
        rows, columns = height // side, width // side
        tiles = channels_of(ground).reshape(3, rows, side, columns, side)
        tiles = tiles.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)
        seen = side // settings.patch * settings.patch
        windows = -(-seen // (settings.patch * settings.merge))
        filled = windows * settings.patch * settings.merge - seen
        tiles = np.pad(tiles[:, :, :seen, :seen], ((0, 0), (0, 0), (0, filled), (0, filled)))
        grid, patches = patches_of(tiles, settings.patch, merge=settings.merge)
        cut = MediaCut(columns=columns, height=rows * windows, width=columns * windows, tail=tail)
        return TowerInput(
            kind="image",
            grid=grid,
            rows=patches,
            num_tokens=cut.height * (cut.width + 1) + tail,
            cut=cut,
        )


def fitted_pixels(picture: Image.Image, height: int, width: int) -> tuple[int, int]:
    """Across and down, as ImageOps.contain rounds them."""
    if picture.width * height > width * picture.height:
        return width, round(picture.height / picture.width * width)
    return round(picture.width / picture.height * height), height
