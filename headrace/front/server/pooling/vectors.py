"""Vectors on the wire: lists of floats, base64 of little-endian float32, and Cohere's quantized forms."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from headrace.front.client.pooling import Float32

_INT8_SCALE = 127.0


def encoded(vectors: Float32, form: str, *, dtype: str = "<f4") -> Any:
    """One vector or matrix as "float" (nested lists) or "base64" (numbers of `dtype`, no padding between rows)."""
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vectors, dtype=dtype).tobytes()).decode()
    return vectors.tolist()


def wire_dtype(embed_dtype: str, endianness: str) -> str:
    """How numpy calls such numbers."""
    return (">" if endianness == "big" else "<") + {"float32": "f4", "float16": "f2"}[embed_dtype]


def cohere_forms(vectors: Float32, forms: list[str]) -> dict[str, Any]:
    """Each asked form of all vectors. int8 and uint8 scale the range [-1, 1]; binary packs signs, eight to a byte."""
    return {form: [_cohere(vector, form) for vector in vectors] for form in forms}


def _cohere(vector: Float32, form: str) -> Any:
    if form in ("float", "base64"):
        return encoded(vector, form)
    if form in ("binary", "ubinary"):
        packed = np.packbits(vector > 0).astype(np.int16)
        return (packed if form == "ubinary" else packed - 128).tolist()
    scaled = np.clip(np.rint(vector * _INT8_SCALE), -127, 127).astype(np.int16)
    return (scaled if form == "int8" else scaled + 128).tolist()
