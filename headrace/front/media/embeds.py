"""Vectors in place of an image or a sound: what an encoder elsewhere gave for it.

They come as a file of NumPy (.npy) in base64: float16 or float32, one vector for each token. A grid
(t, h, w in patches) may be given with them, by which models place the tokens of an image; without
one they are a single row. Only files that are plain arrays are read: nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from typing import Any

import numpy as np

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MAX_ROWS, MediaInput
from headrace.front.media.parts import MediaPart
from headrace.front.media.placeholders import PreparedMedium

READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
TYPES = ("<f2", "<f4")
MAX_HEADER = 4096
MOST = 65504.0
"""The largest number of float16: no vector of an encoder comes near it."""


def embedded(part: MediaPart, merge: int) -> PreparedMedium:
    """The medium of a part with vectors; InvalidRequest with the field, what was given and what is
    allowed. `merge`: patches per side of the window that becomes one token."""
    content, field = part.content, part.field
    grid = None
    if isinstance(content, dict):
        grid = content.get("grid")
        content, field = content.get("data"), f"{field}.data"
    vectors = content if isinstance(content, np.ndarray) else _read(content, field)
    if vectors.ndim == 3 and vectors.shape[0] == 1:
        vectors = vectors[0]
    if vectors.ndim != 2 or not 1 <= vectors.shape[0] <= MAX_ROWS or not vectors.shape[1]:
        raise _bad(
            field,
            f"an array of {vectors.shape}; one vector for each token is needed, 1 to {MAX_ROWS}",
        )
    vectors = np.ascontiguousarray(vectors, "<f4")
    if not (np.abs(vectors) <= MOST).all():
        raise _bad(field, f"numbers that are none, or beyond {MOST:g}")
    sizes = _grid(grid, vectors.shape[0], 1 if part.kind == "audio" else merge, part.field)
    rows = vectors.tobytes()
    prefix = f"vectors {part.kind} {sizes} {vectors.shape}".encode()
    one = MediaInput(
        kind=part.kind,
        key=hashlib.sha256(prefix + rows).digest(),
        offset=0,
        num_tokens=vectors.shape[0],
        grid=sizes,
        rows=rows,
        embedded=True,
    )
    return PreparedMedium(kind=part.kind, inputs=(one,), layout=(0,), merge=merge)


def _grid(value: Any, count: int, merge: int, field: str) -> tuple[int, int, int]:
    if value is None:
        return (1, merge, merge * count)
    whole = isinstance(value, list) and len(value) == 3
    if not whole or any(type(one) is not int or not 1 <= one <= MAX_ROWS for one in value):
        raise _bad(
            f"{field}.grid", f"{value!r:.80} given; three whole numbers (t, h, w) are needed"
        )
    return (value[0], value[1], value[2])


def _read(text: Any, field: str) -> np.ndarray:
    """The array of a .npy file in base64 (NumPy enhancement proposal 1, versions 1 and 2)."""
    if not isinstance(text, str) or not text:
        raise _bad(field, "a .npy file in base64 is needed")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(field, "is not base64") from None
    stream = io.BytesIO(data)
    try:
        reader = READERS.get(np.lib.format.read_magic(stream))
        if reader is None:
            raise ValueError("its version is neither 1.0 nor 2.0")
        shape, fortran, kind = reader(stream, max_header_size=MAX_HEADER)
    except ValueError as error:
        raise _bad(field, f"is no .npy file: {error!s:.200}") from None
    if fortran or kind.str not in TYPES or len(shape) not in (2, 3):
        raise _bad(field, f"an array of two dimensions of {' or '.join(TYPES)} is needed, by rows")
    body = stream.read()
    needed = math.prod(shape) * kind.itemsize
    if len(body) != needed:
        raise _bad(field, f"{len(body)} bytes behind its header, which says {needed}")
    return np.frombuffer(body, kind).reshape(shape)


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
