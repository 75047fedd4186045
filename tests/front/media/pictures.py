"""Pictures, animations and clips for tests, made by the libraries themselves."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + rng.integers(-20, 21, smooth.shape, dtype=np.int16)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def animated(images: list[Image.Image], form: str, duration_ms: int) -> bytes:
    """An animation."""
    return encoded(images[0], form, save_all=True, append_images=images[1:], duration=duration_ms)


def clip(
    images: list[Image.Image],
    rate: Fraction = Fraction(10),
    *,
    container: str = "mp4",
    codec: str = "mpeg4",
) -> bytes:
    """A video file; PyAV is asked for here alone, as machines with a GPU lack it."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for image in images:
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())
    return buffer.getvalue()
