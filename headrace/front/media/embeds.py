"""Vectors in place of an image or a sound: what an encoder elsewhere gave for it.

They come as a file in base64 (tensors.py), one vector for each token. A grid (t, h, w in patches)
may be given with them, by which models place the tokens of an image; without one they are a single
row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MAX_REQUEST_BYTES, MAX_ROWS, MediaInput
from headrace.front.media.parts import MediaPart
from headrace.front.media.placeholders import PreparedMedium
from headrace.front.media.tensors import read_array

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
    vectors = vectors_of(content, field, most_rows=MAX_ROWS, most_bytes=MAX_REQUEST_BYTES)
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


def vectors_of(content: Any, field: str, *, most_rows: int, most_bytes: int) -> np.ndarray:
    """The vectors of a file, or of an array of offline use, float32 [tokens, width]; InvalidRequest
    with the field, what was given and what is allowed."""
    vectors = content
    if not isinstance(content, np.ndarray):
        vectors = read_array(content, field, most_bytes=most_bytes)
    if vectors.ndim == 3 and vectors.shape[0] == 1:
        vectors = vectors[0]
    if vectors.ndim != 2 or not 1 <= vectors.shape[0] <= most_rows or not vectors.shape[1]:
        raise _bad(
            field,
            f"an array of {vectors.shape}; one vector for each token is needed, 1 to {most_rows}",
        )
    vectors = np.ascontiguousarray(vectors, "<f4")
    if not (np.abs(vectors) <= MOST).all():
        raise _bad(field, f"numbers that are none, or beyond {MOST:g}")
    return vectors


def _grid(value: Any, count: int, merge: int, field: str) -> tuple[int, int, int]:
    if value is None:
        return (1, merge, merge * count)
    whole = isinstance(value, list) and len(value) == 3
    if not whole or any(type(one) is not int or not 1 <= one <= MAX_ROWS for one in value):
        raise _bad(
            f"{field}.grid", f"{value!r:.80} given; three whole numbers (t, h, w) are needed"
        )
    return (value[0], value[1], value[2])


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
