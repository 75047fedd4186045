"""DeepSeek-OCR 2: tiles of a picture larger than one, and the whole of it on a grey ground.

As transformers 5.23 (image_processing_pil_deepseek_ocr2.py, processing_deepseek_ocr2.py).
"""

from __future__ import annotations

from PIL import Image

from headrace.base.wire.media import MediaCut
from headrace.front.media.picture import channels_of, patches_of, resized
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.square import SquareProcessor, tiling

GROUND = (127, 127, 127)


class DeepseekOcrProcessor(SquareProcessor):
    """See `Processor`: `side` of the whole, `sizes` of a tile. It has no video."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """The tiles row by row, then the whole, which has a row more than its windows."""
        settings = self._settings
        ((tile, _),) = settings.sizes
        cuts = settings.tiles[1] > 1
        inputs = []
        if cuts and max(picture.size) > tile:
            columns, rows = tiling(picture.width, picture.height, settings.tiles, tile)
            sized = resized(
                picture, height=rows * tile, width=columns * tile, resample=settings.resample
            )
            inputs = [
                self._input(sized.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile)))
                for y in range(rows)
                for x in range(columns)
            ]
        inputs.append(self._whole(picture, settings.side if cuts else tile))
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(range(len(inputs))))

    def _whole(self, picture: Image.Image, side: int) -> TowerInput:
        scale = side / max(picture.size)
        height, width = (max(1, round(one * scale)) for one in (picture.height, picture.width))
        small = resized(picture, height=height, width=width, resample=self._settings.resample)
        ground = Image.new("RGB", (side, side), GROUND)
        ground.paste(small, ((side - width) // 2, (side - height) // 2))
        return self._input(ground, tail=True)

    def _input(self, square: Image.Image, *, tail: bool = False) -> TowerInput:
        settings = self._settings
        grid, rows = patches_of(channels_of(square)[None], settings.patch, merge=settings.merge)
        count = grid[1] * grid[2] // settings.merge**2
        if not tail:
            return TowerInput(kind="image", grid=grid, rows=rows)
        cut = MediaCut(tail=True)
        return TowerInput(kind="image", grid=grid, rows=rows, num_tokens=count + 1, cut=cut)
