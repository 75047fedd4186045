"""Pictures: upright, RGB, resized as the reference processors do it.

Resizing is Pillow's bicubic, in uint8, on the whole picture at once: the slow processors of
transformers do the same, so that results are equal to the bit.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from headrace.front.media import fast_resize

WHITE = (255, 255, 255, 255)


def upright(picture: Image.Image) -> Image.Image:
    """The picture as it is meant to be looked at: turned by its EXIF orientation, in RGB, what is
    transparent on white. 16-bit greys keep their upper 8 bits."""
    orientation = picture.getexif().get(0x0112, 1)
    if orientation != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "RGB" and not picture.has_transparency_data:
        return picture
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        greys = np.asarray(picture).astype(np.float32)
        top = 257.0 if greys.max(initial=0.0) > 255 else 1.0
        eight_bits = np.clip(np.nan_to_num(greys) / top, 0, 255).astype(np.uint8)
        return Image.fromarray(eight_bits).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, WHITE)
        ground.alpha_composite(picture)
        picture = ground
    return picture.convert("RGB")


def resized(
    picture: Image.Image, *, height: int, width: int, resample: int = Image.Resampling.BICUBIC
) -> Image.Image:
    """The picture at this size."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling(resample))


def channels_at(
    picture: Image.Image, *, height: int, width: int, resample: int = Image.Resampling.BICUBIC
) -> np.ndarray:
    """The same as `channels_of` of `resized`: uint8 [3, height, width]; sooner."""
    if picture.size != (width, height):
        channels = fast_resize.channels(picture, height=height, width=width, resample=resample)
        if channels is not None:
            return channels
    return channels_of(resized(picture, height=height, width=width, resample=resample))


def channels_of(picture: Image.Image) -> np.ndarray:
    """An RGB picture as uint8 [3, H, W]."""
    channels = np.empty((3, picture.height, picture.width), dtype=np.uint8)
    for i, band in enumerate(picture.split()):
        channels[i] = np.asarray(band)
    return channels


def patches_of(
    frames: np.ndarray, patch: int, *, merge: int = 1, depth: int = 1, channels: int = 3
) -> tuple[tuple[int, int, int], np.ndarray]:
    """Grid and rows of frames uint8 [F, channels, H, W], `depth` frames to a row, in the order of
    base/wire/media.py: windows of merge * merge patches, a row [channel, frame, y, x]."""
    num_frames, _, height, width = frames.shape
    grid = (num_frames // depth, height // patch, width // patch)
    # A line of a patch moves as one element: half the time of its bytes one by one.
    lines = frames.view(f"V{patch}")
    windows = lines.reshape(
        grid[0], depth, channels, grid[1] // merge, merge, patch, grid[2] // merge, merge
    )
    rows = np.ascontiguousarray(windows.transpose(0, 3, 6, 4, 7, 2, 1, 5))
    return grid, rows.view(np.uint8).reshape(grid[0] * grid[1] * grid[2], -1)
