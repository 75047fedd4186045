"""Pictures resized as Pillow resizes them, to the bit, in a fifth of the time: by resize.cpp, which
resize_library.py compiles.

Pillow passes over rows, then over columns, with weights of 22 bits, which are made here. Its newest
versions pass over columns first where they think that cheaper; such pictures are left to it, as are
filters that are not among FILTERS, and everything where there is no library.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.base import env
from headrace.front.media.resize_library import library_path

_BITS = 22
Channels = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]


def channels(picture: Image.Image, *, height: int, width: int, resample: int) -> Channels | None:
    """An RGB picture at this size as uint8 [3, height, width]; None: ask Pillow."""
    library = _library()
    if library is None or picture.mode != "RGB" or resample not in FILTERS:
        return None
    if not _rows_first(picture, height, width):
        return None
    pixels = np.asarray(picture)
    return _columns(library, _rows(library, pixels, width, resample), height, resample)


def weights(
    size: int, wanted: int, resample: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Of each of `wanted` values: the first of `size` that it is made of, how many, and their
    weights [wanted, taps], the sums of which are one, of 22 bits behind the point."""
    shape, reach = FILTERS[resample]
    step = size / wanted
    stretch = max(step, 1.0)
    support = reach * stretch
    centers = (np.arange(wanted) + 0.5) * step
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + support + 0.5).astype(np.int64), size) - first
    taps = np.arange(math.ceil(support) * 2 + 1)
    exact = shape((taps + (first - centers)[:, None] + 0.5) * (1.0 / stretch))
    exact[taps >= count[:, None]] = 0.0
    sums = np.zeros(wanted)
    for column in exact.T:  # one after another, as they are summed there
        sums += column
    exact /= sums[:, None]
    whole = np.trunc(exact * (1 << _BITS) + np.copysign(0.5, exact))
    return first.astype(np.int32), count.astype(np.int32), whole.astype(np.int32)


def _rows_first(picture: Image.Image, height: int, width: int) -> bool:
    """Whether every version of Pillow passes over rows first, as the old ones always do: where no
    rows become fewer, and where a wide picture becomes smaller to about the same degree on both
    sides. Pillow 13 was asked about thousands of sizes; what it weighs is not documented."""
    if height >= picture.height:
        return True
    narrower, lower = 1 - width / picture.width, 1 - height / picture.height
    return picture.width >= picture.height and narrower >= 0.75 * lower


def _cubic(x: Doubles) -> Doubles:
    """Keys' cubic convolution with a = -1/2."""
    x = np.abs(x)
    near = ((2.0 - 0.5) * x - (3.0 - 0.5)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _linear(x: Doubles) -> Doubles:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


FILTERS: dict[int, tuple[Callable[[Doubles], Doubles], float]] = {
    Image.Resampling.BICUBIC: (_cubic, 2.0),
    Image.Resampling.BILINEAR: (_linear, 1.0),
}
"""Pillow's number of a filter -> its shape, and how far it reaches."""


def _rows(library: ctypes.CDLL, pixels: Channels, wide: int, resample: int) -> Channels:
    """Pixels [H, W, 3] -> [3, H, wide]."""
    height, width, _ = pixels.shape
    if wide == width:
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    first, count, weight = weights(width, wide, resample)
    out = np.empty((3, height, wide), np.uint8)
    beside = np.empty(width * 3 * library.hr_resize_rows_beside(), np.uint8)
    arrays = (np.ascontiguousarray(pixels), out, beside, first, count, weight)
    _call(library.hr_resize_rows, arrays, (height, width, wide, weight.shape[1]))
    return out


def _columns(library: ctypes.CDLL, planes: Channels, high: int, resample: int) -> Channels:
    """Planes [3, H, W] -> [3, high, W]."""
    _, height, width = planes.shape
    if high == height:
        return planes
    first, count, weight = weights(height, high, resample)
    out = np.empty((3, high, width), np.uint8)
    arrays = (planes, out, first, count, weight)
    _call(library.hr_resize_columns, arrays, (height, width, high, weight.shape[1]))
    return out


def _call(function: Any, arrays: Sequence[npt.NDArray[Any]], sizes: Sequence[int]) -> None:
    """With the addresses of arrays, which lie whole in memory, and then sizes."""
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    function(*addresses, *[ctypes.c_int64(size) for size in sizes])


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library; None where it was not built, or native code is turned off."""
    path = library_path()
    if env.get("HEADRACE_NATIVE") == "0" or not os.access(path, os.R_OK):
        return None
    return ctypes.CDLL(str(path))
