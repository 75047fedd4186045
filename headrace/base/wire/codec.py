"""The one encoding of everything that crosses a process border: msgpack with a fixed schema.

A message is a tagged msgspec struct. A numpy array travels as [dtype, shape, raw bytes]; only the
dtypes listed here exist on the wire. Nothing is ever unpickled. Frames on a stream socket are a
4-byte little-endian length and a body.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = {name: np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32")}
MAX_FRAME_BYTES = 1 << 30
HEADER = struct.Struct("<I")


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype.name in _DTYPES, f"dtype {value.dtype} has no wire form"
        return (value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def _decode_hook(wanted: type, value: Any) -> Any:
    if wanted is not np.ndarray:
        raise NotImplementedError(f"{wanted} has no wire form")
    name, shape, data = value
    dtype = _DTYPES.get(name)
    if dtype is None or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"malformed array: dtype {name!r}, shape {shape!r}, {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def cut_frames(buffer: bytearray, *, max_bytes: int) -> list[bytes]:
    """Takes the bodies of the whole frames off the front of `buffer`; ValueError if one is longer
    than `max_bytes`."""
    bodies: list[bytes] = []
    at = 0
    with memoryview(buffer) as view:
        while len(buffer) - at >= HEADER.size:
            end = at + HEADER.size + _size(buffer, at, max_bytes)
            if len(buffer) < end:
                break
            bodies.append(bytes(view[at + HEADER.size : end]))
            at = end
    del buffer[:at]
    return bodies


def read_frame(read: Callable[[int], bytes | None], *, max_bytes: int) -> bytes | None:
    """The body of the next frame; `read` gives so many bytes, or None at the end. ValueError as
    `cut_frames`."""
    header = read(HEADER.size)
    return None if header is None else read(_size(header, 0, max_bytes))


def _size(buffer: bytes | bytearray, at: int, max_bytes: int) -> int:
    size: int = HEADER.unpack_from(buffer, at)[0]
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes; {max_bytes} allowed")
    return size


class Codec(Generic[T]):
    """Encodes and decodes one message type (usually a union of tagged structs)."""

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, dec_hook=_decode_hook
        )

    def encode(self, message: T) -> bytes:
        """The body of a frame."""
        return self._encoder.encode(message)

    def frame(self, message: T) -> bytes:
        """A whole frame: length and body."""
        body = self._encoder.encode(message)
        return HEADER.pack(len(body)) + body

    def decode(self, body: bytes | bytearray | memoryview) -> T:
        """Decodes a body; a malformed one raises msgspec.DecodeError or ValueError."""
        return self._decoder.decode(body)
