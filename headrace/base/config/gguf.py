"""GGUF files: header, metadata and the table of tensors (versions 2 and 3, little-endian), without
reading any weight.

Pure Python, so that the front can take the tokenizer and the chat template from a file, and
`launch` the model's facts. Every count, length and offset is checked against the file before it is
used: a file can neither make us read outside the map nor allocate more than a small multiple of its
own header. Layout: github.com/ggml-org/ggml, docs/gguf.md. The table of tensor types is in
`gguf_types.py`, what the metadata mean to a model in `gguf_config.py`, what the bits of a tensor
mean in `back/models/load`.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from headrace.base.config.gguf_types import TYPES, GGUFType
from headrace.base.errors import CheckpointError

T = TypeVar("T")

MAX_HEADER_BYTES: Final = 128 << 20
"""Largest header that is read (a vocabulary of 260 thousand tokens takes about 10 MB)."""
MAX_TEXT_BYTES: Final = 16 << 20
MAX_DIMS: Final = 4
MAX_ARRAY_DEPTH: Final = 4
MAX_SPLITS: Final = 999


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies: `shape` outermost dimension first, as in PyTorch; `offset` from the
    file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A GGUF model: the metadata of its first file and the tensors of all its files (`paths`, in
    order).

    A value is an int, a float, a bool, a str, a list of str or lists, or an `array.array` of
    numbers.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number of the metadata."""
        return self._typed(key, int, "a whole number", default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number of the metadata, as a float."""
        value = self.metadata.get(key, default)
        if type(value) is int:
            return float(value)
        return self._typed(key, float, "a number", default)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text of the metadata."""
        return self._typed(key, str, "a text", default)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """A truth value of the metadata."""
        return self._typed(key, bool, "true or false", default)

    def texts(self, key: str) -> list[str] | None:
        """A list of texts of the metadata."""
        value = self._typed(key, list, "a list of texts")
        if value and not isinstance(value[0], str):
            raise self.wrong(key, "a list of texts")
        return value

    def numbers(self, key: str) -> array[Any] | None:
        """A list of numbers of the metadata."""
        return self._typed(key, array, "a list of numbers")

    def floats(self, name: str) -> list[float]:
        """The values of a small F32 tensor (rotary factors)."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or tensor.num_bytes > 1 << 20:
            stored = f"{tensor.type.name} of {tensor.num_bytes} bytes"
            raise CheckpointError(
                f"{tensor.path}: tensor {name} is {stored}; it must be small and F32"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            return _numbers("f", file.read(tensor.num_bytes)).tolist()

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        """The error for a value that is there and not allowed."""
        shown = repr(self.metadata.get(key))[:80]
        return CheckpointError(
            f"{self.paths[0]}: {key} is {shown}; it must be {allowed}", field=key
        )

    def _typed(self, key: str, kind: type[T], wanted: str, default: T | None = None) -> T | None:
        value = self.metadata.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            raise self.wrong(key, wanted)
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Header, metadata and tensor table; of all its files for a split model. CheckpointError on any
    flaw."""
    first = _read_file(path)
    count = first.whole("split.count", 1) or 1
    if count == 1:
        return first
    parts = [_read_file(part) for part in _split_paths(path, count)]
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        if part.whole("split.no") != number or part.whole("split.count") != count:
            raise CheckpointError(
                f"{part.paths[0]}: split.no or split.count is not {number} of {count}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                other = tensors[name].path
                raise CheckpointError(f"{tensor.path}: tensor {name!r} is in {other} too")
            tensors[name] = tensor
    _check_split_total(parts[0], len(tensors))
    return GGUFFile(
        paths=tuple(part.paths[0] for part in parts), metadata=parts[0].metadata, tensors=tensors
    )


def _check_split_total(first: GGUFFile, count: int) -> None:
    total = first.whole("split.tensors.count", count)
    if total != count:
        raise CheckpointError(
            f"{first.paths[0]}: split.tensors.count is {total}; the files hold {count}"
        )


def _split_paths(path: Path, count: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != count or not 1 < count <= MAX_SPLITS:
        raise CheckpointError(
            f"{path}: split.count is {count}; the file must be named NAME-00001-of-{count:05d}.gguf"
        )
    names = [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{path.parent}: split GGUF files are missing: {', '.join(missing)}")
    return [path.parent / name for name in names]


def _read_file(path: Path) -> GGUFFile:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or not a file")
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path}: too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data, path).file()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_CODES: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]
_STRING: Final = 8
_ARRAY: Final = 9


class _Cursor:
    """A position in a mapped file. Every move checks that what it passes lies inside the file and
    the header limit."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.pos = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def file(self) -> GGUFFile:
        num_tensors, num_values = self._head()
        metadata = dict(self._values(num_values))
        if len(metadata) != num_values:
            raise self._bad("a metadata key appears twice")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self._bad(f"general.alignment is {alignment!r}; it must be a multiple of 8")
        start = -(-self.pos // alignment) * alignment
        tensors = self._placed(infos, start, alignment)
        return GGUFFile(paths=(self.path,), metadata=metadata, tensors=tensors)

    def _head(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise self._bad("not a GGUF file (the first four bytes are not 'GGUF')")
        self.pos = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            big = "; it may be big-endian" if version >= 1 << 16 else ""
            raise self._bad(f"GGUF version {version}{big}; supported: 2, 3, little-endian")
        num_tensors, num_values = self._scalar(_U64), self._scalar(_U64)
        self._need(num_tensors * 24 + num_values * 13, "the counts of tensors and metadata")
        return num_tensors, num_values

    def _values(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self._text("a metadata key")
            yield key, self._value(self._scalar(_U32), key, MAX_ARRAY_DEPTH)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise self._bad(f"{key} has the unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, key: str, depth: int) -> Any:
        kind, count = self._scalar(_U32), self._scalar(_U64)
        if kind in _CODES:
            size = count * _SCALARS[kind].size
            self._need(size, key)
            self.pos += size
            return _numbers(_CODES[kind], self.data[self.pos - size : self.pos])
        if kind not in (_STRING, _ARRAY):
            raise self._bad(f"{key} has the unknown item type {kind}")
        if depth == 0:
            raise self._bad(f"{key}: lists are nested deeper than {MAX_ARRAY_DEPTH}")
        self._need(count * (8 if kind == _STRING else 12), key)
        if kind == _ARRAY:
            return [self._array(key, depth - 1) for _ in range(count)]
        return self._texts(key, count)

    def _texts(self, key: str, count: int) -> list[str]:
        """`count` texts; a vocabulary and its merges have some 400 thousand, so this loop is kept
        tight."""
        unpack, data, pos, last = _U64.unpack_from, self.data, self.pos, self.end - 8
        texts: list[bytes] = []
        for _ in range(count):
            size = unpack(data, pos)[0] if pos <= last else 0
            if pos + size > last:
                self.pos = pos
                self._need(8 + size, key)
            pos += 8 + size
            texts.append(data[pos - size : pos])
        self.pos = pos
        return [self._decoded(text, key) for text in texts]

    def _text(self, what: str) -> str:
        size = self._scalar(_U64)
        if size > MAX_TEXT_BYTES:
            raise self._bad(f"{what}: a text of {size} bytes; at most {MAX_TEXT_BYTES} are read")
        self._need(size, what)
        self.pos += size
        return self._decoded(self.data[self.pos - size : self.pos], what)

    def _decoded(self, text: bytes, what: str) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"{what}: a text that is not UTF-8 ({error.reason})") from error

    def _scalar(self, layout: struct.Struct) -> Any:
        if self.pos + layout.size > self.end:
            self._need(layout.size, "a number")
        value = layout.unpack_from(self.data, self.pos)[0]
        self.pos += layout.size
        return value

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGUFType, int]:
        name = self._text("a tensor name")
        num_dims = self._scalar(_U32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._bad(
                f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed"
            )
        dims = [self._scalar(_U64) for _ in range(num_dims)]
        number = self._scalar(_U32)
        if number not in TYPES:
            raise self._bad(f"tensor {name!r} has the unknown type {number}")
        return name, tuple(reversed(dims)), TYPES[number], self._scalar(_U64)

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], GGUFType, int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._bad(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self._bad(f"tensor {name!r}: offset {offset} is no multiple of {alignment}")
            num_bytes = self._num_bytes(name, shape, kind)
            begin = start + offset
            if begin + num_bytes > len(self.data):
                raise self._bad(
                    f"tensor {name!r}: bytes {begin} to {begin + num_bytes} are outside the file "
                    f"of {len(self.data)} bytes; it is truncated or damaged"
                )
            tensors[name] = GGUFTensor(
                name=name, shape=shape, type=kind, path=self.path, offset=begin, num_bytes=num_bytes
            )
        self._check_overlap(tensors)
        return tensors

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: GGUFType) -> int:
        count = 1
        for size in shape:
            if size < 1:
                raise self._bad(f"tensor {name!r} has the shape {shape}")
            count *= size
        if shape[-1] % kind.block:
            raise self._bad(
                f"tensor {name!r}: rows of {shape[-1]} are no multiple of {kind.name}'s {kind.block}"
            )
        return count // kind.block * kind.size

    def _check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end, last = 0, ""
        for tensor in sorted(tensors.values(), key=lambda one: one.offset):
            if tensor.offset < end:
                raise self._bad(f"tensors {last!r} and {tensor.name!r} overlap")
            end, last = tensor.offset + tensor.num_bytes, tensor.name

    def _need(self, size: int, what: str) -> None:
        left = self.end - self.pos
        if size > left:
            raise self._bad(
                f"{what}: needs {size} bytes at {self.pos}, {left} are left; the file is damaged"
            )

    def _bad(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")


def _numbers(code: str, data: bytes) -> array[Any]:
    values: array[Any] = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
