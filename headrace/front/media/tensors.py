"""Arrays that clients send as files in base64: NumPy's .npy, safetensors, or what `torch.save`
writes. Dense float16, bfloat16 or float32 arrays by rows alone are read, and every size is checked
against the file before anything is allocated.

A file of `torch.save` is a ZIP archive with a pickle in it, which says where the numbers lie. It is
never unpickled: the dozen opcodes that one dense tensor takes are followed here over plain numbers
and texts, names stay names, and anything else is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.base.errors import InvalidRequest

MAX_HEADER = 4096
"""Bytes of what stands before the numbers."""
MAX_MEMBERS = 64
HALVES = "bf16"
"""bfloat16, which NumPy does not know: the upper halves of float32."""
_NPY = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_NPY_TYPES = ("<f2", "<f4")
_SAFETENSORS = {"F16": "<f2", "F32": "<f4", "BF16": HALVES}
_STORAGES = {
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch BFloat16Storage": HALVES,
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_HOOKS = ("collections OrderedDict", ())


def read_array(text: Any, field: str, *, most_bytes: int) -> np.ndarray:
    """The array of a file, float32 or float16; InvalidRequest with the field and what is wrong.
    `most_bytes`: the numbers may take."""
    if not isinstance(text, str) or not text:
        raise _bad(field, "a .npy, safetensors or torch file in base64 is needed")
    if len(text) > (most_bytes + (64 << 10)) * 4 // 3 + 4:
        raise _bad(
            field, f"{len(text)} characters; numbers of at most {most_bytes} bytes are allowed"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(field, "is not base64") from None
    reader = _reader_of(data)
    if reader is None:
        raise _bad(field, "is no .npy, safetensors or torch file")
    try:
        kind, shape, numbers = reader(data)
    except _BROKEN as error:
        raise _bad(field, f"cannot be read: {error!s:.200}") from None
    needed = math.prod(shape) * (2 if kind != "<f4" else 4)
    if len(numbers) != needed:
        raise _bad(field, f"{len(numbers)} bytes behind its header, which says {needed}")
    if kind == HALVES:
        halves = np.frombuffer(numbers, "<u2").astype("<u4")
        return (halves << 16).view("<f4").reshape(shape)
    return np.frombuffer(numbers, kind).reshape(shape)


_BROKEN = (
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    OSError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
)
"""What readers of files raise, ours and Python's, for those that are none."""
_Read = tuple[str, tuple[int, ...], memoryview]


def _reader_of(data: bytes) -> Callable[[bytes], _Read] | None:
    if data[:6] == b"\x93NUMPY":
        return _npy
    if data[:4] == b"PK\x03\x04":
        return _torch
    return _safetensors if data[8:9] == b"{" else None


def _npy(data: bytes) -> _Read:
    """NumPy enhancement proposal 1, versions 1 and 2."""
    stream = io.BytesIO(data)
    reader = _NPY.get(np.lib.format.read_magic(stream))
    if reader is None:
        raise ValueError("its version is neither 1.0 nor 2.0")
    shape, by_columns, kind = reader(stream, max_header_size=MAX_HEADER)
    if by_columns or kind.str not in _NPY_TYPES:
        raise ValueError(f"an array of {' or '.join(_NPY_TYPES)} is needed, by rows")
    return kind.str, shape, memoryview(data)[stream.tell() :]


def _safetensors(data: bytes) -> _Read:
    """One tensor, whatever it is called (github.com/huggingface/safetensors, "Format")."""
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise ValueError(f"a header of {length} bytes; at most {MAX_HEADER} are allowed")
    header = json.loads(data[8 : 8 + length])
    tensors = [one for name, one in header.items() if name != "__metadata__"]
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors; one is needed")
    (one,) = tensors
    begin, end = one["data_offsets"]
    shape = _shape(one["shape"])
    if one["dtype"] not in _SAFETENSORS or begin != 0 or type(end) is not int or end < 0:
        raise ValueError(f"dtype {one['dtype']!r:.20}; {', '.join(_SAFETENSORS)} are allowed")
    return _SAFETENSORS[one["dtype"]], shape, memoryview(data)[8 + length : 8 + length + end]


def _torch(data: bytes) -> _Read:
    """`torch.save` of one tensor: NAME/data.pkl says which part of NAME/data/KEY it is."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {one.filename.partition("/")[2]: one for one in archive.infolist()[:MAX_MEMBERS]}
        if any(one.compress_type != zipfile.ZIP_STORED for one in members.values()):
            raise ValueError("its members are compressed")
        if members["data.pkl"].file_size > MAX_HEADER:
            raise ValueError(f"data.pkl has more than {MAX_HEADER} bytes")
        order = members.get("byteorder")
        if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
            raise ValueError("its byte order is not little")
        kind, key, first, shape = _dense_tensor(archive.read(members["data.pkl"]))
        stored = members[f"data/{key}"]
        if stored.file_size > len(data):
            raise ValueError(f"data/{key} is larger than the file")
        size = 2 if kind != "<f4" else 4
        numbers = memoryview(archive.read(stored))
        return kind, shape, numbers[first * size : (first + math.prod(shape)) * size]


def _dense_tensor(program: bytes) -> tuple[str, str, int, tuple[int, ...]]:
    """The type of its numbers, the key of the storage they lie in, the first of them there, and
    the shape; ValueError for what is no dense tensor by rows."""
    followed = _Program(program)
    while followed.step():
        continue
    rebuilt = followed.stack.pop()
    if not (isinstance(rebuilt, tuple) and len(rebuilt) == 2 and rebuilt[0] == _REBUILD):
        raise ValueError("it holds something else than one dense tensor")
    storage, first, shape, strides, _, hooks = rebuilt[1]
    what, of_type, key, _, _ = storage[1] if storage[0] == "stored" else (None,) * 5
    if what != "storage" or of_type not in _STORAGES or hooks != _HOOKS:
        raise ValueError(f"{of_type!s:.60}: tensors of {', '.join(_STORAGES)} are allowed")
    shape = _shape(shape)
    by_rows = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(a != b and n > 1 for a, b, n in zip(strides, by_rows, shape, strict=True)):
        raise ValueError("its numbers do not lie by rows: send tensor.contiguous()")
    if type(first) is not int or first < 0 or not isinstance(key, str):
        raise ValueError("its storage is not said")
    return _STORAGES[of_type], key, first, shape


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= 4:
        raise ValueError("1 to 4 dimensions are allowed")
    if any(type(size) is not int or not 0 <= size < 1 << 40 for size in sizes):
        raise ValueError(f"{sizes!r:.80} is no shape")
    return tuple(sizes)


class _Mark:
    """Where a tuple begins on the stack."""


class _Program:
    """A pickle of protocol 2 on its way, with the opcodes for numbers, texts, tuples and names. A
    call stays (name, arguments), what lies elsewhere ("stored", where)."""

    def __init__(self, code: bytes) -> None:
        self._code, self._at = code, 0
        self.stack: list[Any] = []
        self._kept: dict[int, Any] = {}

    def step(self) -> bool:
        """The next opcode; whether it is not the last."""
        opcode = self._taken(1)
        if opcode == b".":
            return False
        action = _OPCODES.get(opcode)
        if action is None:
            raise ValueError(f"opcode {opcode!r} of its pickle is none that a dense tensor has")
        action(self)
        return True

    def protocol(self) -> None:
        """The head."""
        if self.number(1) != 2:
            raise ValueError("its pickle is not of protocol 2")

    def name(self) -> None:
        """Module and name, as a text."""
        module = self._line()
        self.stack.append(f"{module} {self._line()}")

    def keep(self) -> None:
        """What is on top, for later."""
        self._kept[self.number(1)] = self.stack[-1]

    def kept(self) -> None:
        """Something of before."""
        self.stack.append(self._kept[self.number(1)])

    def text(self) -> None:
        """A text with its length before it."""
        self.stack.append(self._taken(self.number(4)).decode())

    def tuple_of(self, count: int) -> None:
        """Of what is on top."""
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def tuple_from_mark(self) -> None:
        """Of all behind the last mark."""
        begin = len(self.stack) - 1 - self.stack[::-1].index(_Mark)
        self.stack[begin:] = [tuple(self.stack[begin + 1 :])]

    def stored(self) -> None:
        """What lies elsewhere."""
        self.stack.append(("stored", self.stack.pop()))

    def call(self) -> None:
        """A name and its arguments, beside each other."""
        arguments = self.stack.pop()
        self.stack.append((self.stack.pop(), arguments))

    def number(self, count: int, *, signed: bool = False) -> int:
        """Of so many bytes."""
        return int.from_bytes(self._taken(count), "little", signed=signed)

    def _taken(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._code):
            raise ValueError("its pickle ends too early")
        return self._code[self._at - count : self._at]

    def _line(self) -> str:
        end = self._code.index(b"\n", self._at)
        return self._taken(end + 1 - self._at)[:-1].decode("ascii")


_OPCODES: dict[bytes, Callable[[_Program], None]] = {
    b"\x80": _Program.protocol,
    b"c": _Program.name,
    b"q": _Program.keep,
    b"h": _Program.kept,
    b"X": _Program.text,
    b"K": lambda program: program.stack.append(program.number(1)),
    b"M": lambda program: program.stack.append(program.number(2)),
    b"J": lambda program: program.stack.append(program.number(4, signed=True)),
    b"\x8a": lambda program: program.stack.append(program.number(program.number(1), signed=True)),
    b"\x88": lambda program: program.stack.append(True),
    b"\x89": lambda program: program.stack.append(False),
    b")": lambda program: program.stack.append(()),
    b"(": lambda program: program.stack.append(_Mark),
    b"\x85": lambda program: program.tuple_of(1),
    b"\x86": lambda program: program.tuple_of(2),
    b"\x87": lambda program: program.tuple_of(3),
    b"t": _Program.tuple_from_mark,
    b"Q": _Program.stored,
    b"R": _Program.call,
}


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
