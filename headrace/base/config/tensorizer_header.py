"""The index of a file of CoreWeave's tensorizer, checked against the file: names, types, shapes and
places, nothing that could run code.

Five bytes "|TZR|", the version, feature flags, sizes and the number of tensors; then the index: per
tensor name, kind, type, shape, where its header and its bytes lie. Source: tensorizer 2.12
(`serialization.py`), versions 1, 2, 4 and 5; encrypted files (version 3, or a flag) are refused.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.base.config.safetensors_header import (
    DTYPE_BYTES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    StoredTensor,
    read_safetensors_header,
)
from headrace.base.errors import CheckpointError

SUFFIX: Final = ".tensors"
MAGIC: Final = b"|TZR|"
DTYPES: Final[Mapping[str, str]] = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<i2": "I16", "<u2": "U16", "<i4": "I32",
    "<u4": "U32", "<i8": "I64", "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64",
    "torch.bfloat16": "BF16", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""NumPy's name of a type, or PyTorch's behind one that only says its size."""
_HEAD = struct.Struct("<5sI32sQ8xQQ")
"""Magic, version, flags, size of all (not exact), number of tensors, bytes of the index."""
_ENCRYPTED, _VERSIONED = 1, 2
_LONG_SHAPES = 5
"""The version of an entry from which on sizes have 8 bytes."""


def read_weights_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of weights in either format; CheckpointError as
    read_safetensors_header."""
    reader = read_tensorizer_header if path.suffix == SUFFIX else read_safetensors_header
    return reader(path)


def read_tensorizer_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file by name; truncated, overlapping, encrypted, of unknown versions or
    types: CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            length = _index_bytes(path, head, size)
            index = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    _, _, flags, _, count, _ = _HEAD.unpack(head)
    entries = _Entries(path, index, versioned=bool(flags[0] & _VERSIONED))
    tensors: dict[str, StoredTensor] = {}
    for _ in range(count):
        tensor = entries.next(size)
        if tensor.name in tensors:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    _check_places(path, tensors, _HEAD.size + length)
    return tensors


def _index_bytes(path: Path, head: bytes, size: int) -> int:
    if len(head) < _HEAD.size:
        raise CheckpointError(f"{path}: {size} bytes are no tensorizer file; it is truncated")
    magic, version, flags, _, _, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise CheckpointError(f"{path}: begins with {magic!r}, not {MAGIC!r}: no tensorizer file")
    if version == 3 or flags[0] & _ENCRYPTED:
        raise CheckpointError(f"{path}: is encrypted; save it again without a key")
    if version not in (1, 2, 4, 5) or flags[0] > _VERSIONED or any(flags[1:]):
        raise CheckpointError(
            f"{path}: version {version} with flags {flags.rstrip(bytes(1)).hex() or 0}; versions "
            "1, 2, 4 and 5 are read"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: an index of {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    if length > size - _HEAD.size:
        raise CheckpointError(
            f"{path}: the index needs {_HEAD.size + length} bytes, the file has {size}; it is "
            "truncated"
        )
    return int(length)


class _Entries:
    """The index, entry by entry."""

    def __init__(self, path: Path, index: bytes, *, versioned: bool) -> None:
        self._path, self._index, self._versioned = path, index, versioned
        self._at = 0

    def next(self, size: int) -> StoredTensor:
        """The next tensor of a file of so many bytes."""
        version = self._number("I") if self._versioned else 1
        name = self._text("H")
        where = f"{self._path}: tensor {name!r}"
        if name.startswith("\x1e"):
            raise CheckpointError(f"{where}: has a path for a name; names must be words")
        self._number("B")  # parameter, buffer or entry of a dictionary
        written = self._text("B")
        dtype = DTYPES.get(written.rpartition("\0")[2])
        if dtype is None:
            known = ", ".join(sorted(DTYPES))
            raise CheckpointError(f"{where}: type {written!r} is not one of {known}")
        dims = self._number("B")
        if dims > MAX_DIMS:
            raise CheckpointError(f"{where}: {dims} dimensions; at most {MAX_DIMS} are read")
        wide = "Q" if version >= _LONG_SHAPES else "I"
        shape = tuple(self._number(wide) for _ in range(dims))
        _, offset, length = (self._number("Q") for _ in range(3))
        wanted = math.prod(shape) * DTYPE_BYTES[dtype]
        if length != wanted:
            raise CheckpointError(
                f"{where}: {dtype} {list(shape)} takes {wanted} bytes, the index says {length}"
            )
        if offset + length > size:
            raise CheckpointError(
                f"{where} ends at byte {offset + length}, the file has {size}; it is truncated"
            )
        return StoredTensor(
            name=name, dtype=dtype, shape=shape, path=self._path, offset=offset, num_bytes=length
        )

    def _number(self, form: str) -> int:
        number: int = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]
        return number

    def _text(self, length: str) -> str:
        raw = self._bytes(self._number(length))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {raw[:64]!r} of the index is no UTF-8") from error

    def _bytes(self, count: int) -> bytes:
        part = self._index[self._at : self._at + count]
        if len(part) < count:
            raise CheckpointError(f"{self._path}: the index ends within an entry; it is truncated")
        self._at += count
        return part


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], start: int) -> None:
    """No tensor lies in the index or in another one; headers lie between them."""
    end, last = start, "the index"
    for tensor in sorted(tensors.values(), key=lambda one: (one.offset, one.num_bytes)):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} overlaps {last}")
        end, last = tensor.offset + tensor.num_bytes, f"tensor {tensor.name!r}"
