"""Phi-3-vision: a picture enlarged to as many tiles as are allowed, with white above and below (on
both sides of an upright one), and behind them the whole at the size of one.

As its authors' processor (microsoft/Phi-3.5-vision-instruct): the whole is made of the tiles'
picture, by bicubic interpolation that does not smooth; here its values are whole numbers, within
one."""

from __future__ import annotations

import math

from PIL import Image

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaCut
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.phi4 import cut_tiles, shrunk
from headrace.front.media.processors.square import SquareProcessor

WHITE = (255, 255, 255)


class Phi3Processor(SquareProcessor):
    """See `Processor`. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """Two inputs: the tiles, and the whole."""
        settings, side = self._settings, self._settings.side
        width, height = self._size(picture)
        wide, high = (math.ceil(one / side) * side for one in (width, height))
        ground = Image.new("RGB", (wide, high), WHITE)
        bilinear = Image.Resampling.BILINEAR.value
        small = resized(picture, height=height, width=width, resample=bilinear)
        ground.paste(small, ((wide - width) // 2, (high - height) // 2))
        channels, columns, rows = channels_of(ground), wide // side, high // side
        windows = side // settings.patch // settings.merge
        parts = []
        for tiles, across, down, tail in (
            (cut_tiles(channels, rows, columns), columns, rows, True),
            (shrunk(channels, side)[None], 1, 1, False),
        ):
            grid, pixels = patches_of(tiles, settings.patch, merge=settings.merge)
            cut = MediaCut(columns=across, height=down * windows, width=across * windows, tail=tail)
            count = cut.height * (cut.width + 1) + tail
            parts.append(
                TowerInput(kind="image", grid=grid, rows=pixels, num_tokens=count, cut=cut)
            )
        return ProcessedMedia(inputs=tuple(parts), layout=(0, 1))

    def _size(self, picture: Image.Image) -> tuple[int, int]:
        """Pixels across and down: as many tiles across (down, if it is upright) as the number of
        all allows, and what its ratio gives."""
        short, long = sorted(picture.size)
        ratio, most = long / short, self._settings.tiles[1]
        tiles = 1
        while (tiles + 1) * math.ceil((tiles + 1) / ratio) <= most:
            tiles += 1
        longer = tiles * self._settings.side
        shorter = int(longer / ratio)
        if not shorter:
            raise InvalidRequest(
                f"a picture of {picture.width} x {picture.height} pixels given; its shorter side "
                f"would have none of them; the longer one may be at most {longer} times the other"
            )
        return (longer, shorter) if picture.width >= picture.height else (shorter, longer)
