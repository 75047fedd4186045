"""PaddleOCR-VL: pictures of any size, those narrower than a window made wider first.

As transformers 5.23 (image_processing_pil_paddleocr_vl.py).
"""

from __future__ import annotations

from headrace.front.media.processing import MAX_PATCHES
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor


class PaddleOcrProcessor(QwenVisionProcessor):
    """See `Processor`."""

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """See QwenVisionProcessor."""
        factor = self._factor
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        least, most = self._settings.image_pixels
        most = min(most, MAX_PATCHES * self._settings.patch**2)
        return self._fitted(1, height, width, least, most)
