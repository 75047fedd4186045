"""The header of a safetensors file, checked against the file before anything else is read.

Eight bytes little-endian: the header's length; that many bytes of JSON: name -> dtype, shape,
[begin, end); then the tensors' bytes without gaps (github.com/huggingface/safetensors, README,
"Format"). No weight is touched here, so that `headrace plan` and the loader refuse a broken file in
milliseconds, before any allocation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.base.config.hf import ConfigReader, parse_json
from headrace.base.errors import CheckpointError

MAX_HEADER_BYTES: Final = 64 << 20
MAX_DIMS: Final = 16
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies; `offset` counts from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file by name; truncated, overlapping, gapped, mis-sized or unknown:
    CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: the header needs {8 + length} bytes, the file has {size}; it is truncated"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_safetensors_header(raw, path, size=size)


def parse_safetensors_header(raw: bytes, path: Path, *, size: int) -> dict[str, StoredTensor]:
    """The tensors of a file of `size` bytes by its JSON; as read_safetensors_header."""
    header, start = parse_json(raw, f"{path} (header)"), 8 + len(raw)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, path, start) for name, entry in header.items()}
    _check_layout(path, tensors, start=start, size=size)
    return tensors


def _tensor(name: str, entry: Any, path: Path, start: int) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its header entry is no object")
    reader = ConfigReader(entry, where)
    dtype = reader.choice("dtype", DTYPE_BYTES)
    shape = reader.list("shape", of=int)
    begin, end = reader.list("data_offsets", of=int, length=2)
    if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
        raise reader.wrong("shape", f"at most {MAX_DIMS} sizes of at least 0")
    if not 0 <= begin <= end:
        raise reader.wrong("data_offsets", "two rising offsets")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{where}: {dtype} {list(shape)} takes {num_bytes} bytes, data_offsets span {end - begin}"
        )
    return StoredTensor(
        name=name, dtype=dtype, shape=shape, path=path, offset=start + begin, num_bytes=num_bytes
    )


def _check_layout(
    path: Path, tensors: Mapping[str, StoredTensor], *, start: int, size: int
) -> None:
    """The tensors fill the file from `start` to its end `size`, one after another."""
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"the file has {size}; it is truncated"
            )
    end, last = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda one: (one.offset, one.num_bytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {fault} {last}")
        end, last = tensor.offset + tensor.num_bytes, f"tensor {tensor.name!r}"
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes follow {last} and belong to no tensor")
