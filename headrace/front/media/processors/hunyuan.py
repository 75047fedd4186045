"""HunYuanVL: Qwen2-VL's windows, with a token more for each of their rows and at either end.

As transformers 5.23 (image_processing_pil_hunyuan_vl.py, processing_hunyuan_vl.py).
"""

from __future__ import annotations

from PIL import Image

from headrace.front.media.picture import channels_at, patches_of
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor
from headrace.front.media.processors.square import SquareProcessor


class HunyuanProcessor(SquareProcessor):
    """See `Processor`."""

    def image(self, picture: Image.Image) -> ProcessedMedia:
        """One input."""
        settings = self._settings
        height, width = QwenVisionProcessor(settings).image_size(picture.height, picture.width)
        channels = channels_at(picture, height=height, width=width)
        grid, rows = patches_of(channels[None], settings.patch, merge=settings.merge)
        down, across = grid[1] // settings.merge, grid[2] // settings.merge
        count = down * (across + 1) + 2
        one = TowerInput(kind="image", grid=grid, rows=rows, num_tokens=count)
        return ProcessedMedia(inputs=(one,), layout=(0,))
