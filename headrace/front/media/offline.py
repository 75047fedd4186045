"""Media as objects: what scripts hand over in place of addresses."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def content_bytes(content: Any, field: str) -> tuple[bytes, ...]:
    """Bytes of one file, of a Pillow image, of uint8 pixels [H, W, 3], or of a list of these (the
    frames of a video)."""
    if isinstance(content, bytes | bytearray | memoryview):
        return (bytes(content),)
    from PIL import Image as images

    if isinstance(content, images.Image):
        return (_png(content),)
    if isinstance(content, np.ndarray) and content.dtype == np.uint8 and content.ndim == 3:
        return (_png(images.fromarray(content)),)
    if isinstance(content, np.ndarray) and content.dtype == np.uint8 and content.ndim == 4:
        return tuple(_png(images.fromarray(frame)) for frame in content)
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        return tuple(file for each in content for file in content_bytes(each, field))
    raise InvalidRequest(
        f"{field}: {type(content).__name__} given; bytes, a Pillow image or uint8 pixels "
        "[H, W, 3] are needed",
        field=field,
    )


def _png(picture: Image) -> bytes:
    buffer = io.BytesIO()
    if picture.mode not in _MODES:
        picture = picture.convert("RGB")
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
