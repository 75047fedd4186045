"""Safetensors checkpoints: headers checked on opening, then slices of the files brought into place.

What lies in the file as it is wanted is read straight into the model's memory: through a map each
page of the file would fault, and count as memory of ours (a server of 1.2 GB of weights held 2.8 GB
at its peak, and holds 1.6). Columns, and what is converted, come through a map, private and never
written. Only the wanted bytes are read, so a rank of a tensor-parallel group reads its share of the
rows, not the whole file.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.back.models.load.pinned import PinnedReaders
from headrace.back.models.load.source import HOST, CheckpointTensor
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.quantization import Numbers
from headrace.base.config.safetensors_header import StoredTensor, read_safetensors_header
from headrace.base.config.weight_files import WeightFiles, find_weight_files
from headrace.base.errors import CheckpointError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


class SafetensorsSource:
    """All safetensors files of one model folder."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        files = find_weight_files(folder)
        self._stored = _all_tensors(files)
        order = {path: number for number, path in enumerate(files.files)}
        self.entries: Mapping[str, CheckpointTensor] = {
            name: CheckpointTensor(
                shape=stored.shape,
                dtype=stored.dtype,
                where=str(stored.path),
                order=(order[stored.path], stored.offset),
            )
            for name, stored in self._stored.items()
        }
        self._maps: dict[Path, torch.Tensor] = {}
        self._files = {path: _opened(path) for path in files.files}
        self._mapping = threading.Lock()
        self._readers = PinnedReaders()

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """Copies a rectangle, converting floats to the target's dtype. A file that cannot be read,
        or has become shorter since it was opened, is a CheckpointError."""
        stored = self._stored[name]
        try:
            self._copy(stored, shape, source, target)
        except OSError as error:
            raise CheckpointError(
                f"{stored.path}: tensor {name!r}, which begins at byte {stored.offset}: {error}"
            ) from error

    def _copy(
        self,
        stored: StoredTensor,
        shape: tuple[int, ...],
        source: tuple[slice, ...],
        target: torch.Tensor,
    ) -> None:
        if target.device.type != "cpu":
            self._readers.copy(
                stored.path,
                stored.offset,
                dtype=TORCH_DTYPES[stored.dtype],
                shape=shape,
                source=source,
                target=target,
            )
            return
        dtype = TORCH_DTYPES[stored.dtype]
        if dtype == target.dtype and target.is_contiguous() and _are_rows(shape, source):
            row = math.prod(shape[1:]) * dtype.itemsize
            rows = source[0] if source else slice(None)
            first, last, _ = rows.indices(shape[0] if shape else 1)
            assert target.nbytes == (last - first) * row, (stored, target.shape, source)
            _read(self._files[stored.path], stored.offset + first * row, target)
            return
        data = self._map(stored.path)[stored.offset : stored.offset + stored.num_bytes]
        if stored.offset % dtype.itemsize:
            data = data.clone()
        target.copy_(data.view(dtype).view(shape)[source])

    def content(self, name: str) -> bytes:
        """All bytes of a small tensor."""
        stored = self._stored[name]
        return os.pread(self._files[stored.path], stored.num_bytes, stored.offset)

    def blocks(self, name: str) -> StoredRows:
        """There are none in this format."""
        raise AssertionError(f"{name} is not stored in blocks")

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """There are none in this format."""
        raise AssertionError(f"{name} is not stored in groups")

    def close(self) -> None:
        """Drops the maps and closes the files."""
        self._maps = {}
        self._readers.close()
        while self._files:
            os.close(self._files.popitem()[1])

    def _map(self, path: Path) -> torch.Tensor:
        with self._mapping:
            if path not in self._maps:
                self._maps[path] = _mapped(path)
            return self._maps[path]


def _all_tensors(files: WeightFiles) -> dict[str, StoredTensor]:
    """The tensors of all files; one that is in two files, or not where the index says, is
    refused."""
    stored_tensors: dict[str, StoredTensor] = {}
    for path in files.files:
        for name, stored in read_safetensors_header(path).items():
            if name in stored_tensors:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in {stored_tensors[name].path.name} too"
                )
            stored_tensors[name] = stored
    if files.weight_map is not None:
        _check_index(files.weight_map, stored_tensors)
    return stored_tensors


def _check_index(weight_map: Mapping[str, str], stored_tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in weight_map.items():
        if name not in stored_tensors:
            raise CheckpointError(f"{file}: tensor {name!r} is missing; the index says it is there")
        if stored_tensors[name].path.name != file:
            actual = stored_tensors[name].path
            raise CheckpointError(f"{actual}: tensor {name!r} is here; the index says in {file}")
    for name, stored in stored_tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{stored.path}: tensor {name!r} is not in the index")


def _opened(path: Path) -> int:
    """The file, which the system is told to fetch if it is not in memory."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
    return file


def _are_rows(shape: tuple[int, ...], source: tuple[slice, ...]) -> bool:
    """Whether the rectangle is one piece of the file: whole rows without gaps."""
    cuts = [cut.indices(size) for cut, size in zip(source, shape, strict=False)]
    return all(step == 1 for _, _, step in cuts) and all(
        cut == (0, size, 1) for cut, size in zip(cuts[1:], shape[1:], strict=False)
    )


def _read(file: int, offset: int, target: torch.Tensor) -> None:
    """Fills the target from the file; OSError if the file has become shorter."""
    view, done = memoryview(target.reshape(-1).view(torch.uint8).numpy()), 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if got == 0:
            raise OSError(f"the file ends {len(view) - done} bytes early")
        done += got


def _mapped(path: Path) -> torch.Tensor:
    """The file as bytes. A private map counts as writable, which torch asks for; nothing is ever
    written to it."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(data, dtype=torch.uint8)
