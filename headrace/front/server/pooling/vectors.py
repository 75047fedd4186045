"""Vectors on the wire: lists of floats, numbers of a type as base64 or as the body, and Cohere's
quantized forms.

Numbers narrower than float32 are rounded to the nearest, ties to even. fp8 is the OCP formats (E4M3
without infinities, E5M2): what exceeds E4M3 becomes its greatest number, as in PyTorch 2.13."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from starlette.responses import Response

from headrace.front.client.pooling import Float32

NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
MAX_IN_HEADER = 512
"""So many vectors find room in the header that describes a binary answer."""
METADATA = "metadata"
_INT8_SCALE = 127.0
_FP8_BITS = {"fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2)}  # of exponent and mantissa
_FP8_LAST = {"fp8_e4m3": 126, "fp8_e5m2": 124}  # the greatest number, infinity
_SIGN, _NAN = 0x80, 0x7F


def packed(vectors: Float32, number: str, *, big: bool) -> bytes:
    """The numbers of a vector or matrix one after the other, no padding between rows."""
    order = ">" if big else "<"
    match number:
        case "float32" | "float16":
            width = 4 if number == "float32" else 2
            return np.ascontiguousarray(vectors, dtype=f"{order}f{width}").tobytes()
        case "bfloat16":
            return _bfloat16(vectors).astype(f"{order}u2").tobytes()
        case _:
            return _fp8(vectors, number).tobytes()


def _bfloat16(values: Float32) -> npt.NDArray[np.uint32]:
    """The upper halves of float32, rounded."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint32)


def _fp8(values: Float32, number: str) -> npt.NDArray[np.uint8]:
    """The codes of the nearest numbers."""
    between = _fp8_midpoints(number)
    size = np.abs(np.ascontiguousarray(values, dtype=np.float64))
    codes = np.searchsorted(between, size, side="left")
    tied = between[np.minimum(codes, len(between) - 1)] == size
    codes += tied & (codes % 2 == 1)
    codes = np.where(np.isnan(values), _NAN, codes)
    return (codes | np.where(np.signbit(values), _SIGN, 0)).astype(np.uint8)


@cache
def _fp8_midpoints(number: str) -> npt.NDArray[np.float64]:
    """What lies in the middle between each code's number and the next one's."""
    exponent_bits, mantissa_bits = _FP8_BITS[number]
    codes = np.arange(_FP8_LAST[number] + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    share = mantissa / (1 << mantissa_bits) + (exponent > 0)
    bias = (1 << (exponent_bits - 1)) - 1
    numbers = share * np.exp2(np.maximum(exponent, 1) - bias)
    middles: npt.NDArray[np.float64] = (numbers[1:] + numbers[:-1]) / 2
    return middles


def encoded(vectors: Float32, form: str, *, number: str = "float32", big: bool = False) -> Any:
    """One vector or matrix as "float" (nested lists) or "base64"."""
    if form == "base64":
        return base64.b64encode(packed(vectors, number, big=big)).decode()
    return vectors.tolist()


def binary_response(
    vectors: list[Float32], document: dict[str, Any], number: str, *, big: bool, in_header: bool
) -> Response:
    """The vectors as the body. `told`: where each of them stands is in a header, beside what else
    `document` says."""
    bodies = [packed(vector, number, big=big) for vector in vectors]
    items: list[dict[str, Any]] = []
    at = 0
    for i, (vector, body) in enumerate(zip(vectors, bodies, strict=True)):
        items.append(
            {
                "index": i,
                "embed_dtype": number,
                "endianness": "big" if big else "little",
                "start": at,
                "end": at + len(body),
                "shape": list(vector.shape),
            }
        )
        at += len(body)
    headers = {METADATA: orjson.dumps({**document, "data": items}).decode()} if in_header else None
    return Response(b"".join(bodies), media_type="application/octet-stream", headers=headers)


def cohere_forms(vectors: Float32, forms: list[str]) -> dict[str, Any]:
    """Each asked form of all vectors. int8 and uint8 scale the range [-1, 1]; binary packs signs,
    eight to a byte."""
    return {form: [_cohere(vector, form) for vector in vectors] for form in forms}


def _cohere(vector: Float32, form: str) -> Any:
    if form in ("float", "base64"):
        return encoded(vector, form)
    if form in ("binary", "ubinary"):
        bits = np.packbits(vector > 0).astype(np.int16)
        return (bits if form == "ubinary" else bits - 128).tolist()
    scaled = np.clip(np.rint(vector * _INT8_SCALE), -127, 127).astype(np.int16)
    return (scaled if form == "int8" else scaled + 128).tolist()
