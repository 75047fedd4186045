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
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.back.models.load.pinned import PinnedReaders
from headrace.back.models.load.readers import BufferedReader, Reader
from headrace.back.models.load.source import HOST, CheckpointTensor
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.quantization import Numbers
from headrace.base.config.safetensors_header import StoredTensor
from headrace.base.config.weight_files import WeightFiles
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

ROWS_BYTES = 16 << 20
"""Of what is converted or cut, without a map, at a time."""


class SafetensorsSource:
    """All safetensors files of one model folder, or of where its reader finds them."""

    def __init__(
        self, folder: Path, reader: Reader | None = None, files: WeightFiles | None = None
    ) -> None:
        """`files`: other ones than those of the whole model."""
        self.where = str(folder)
        self._reader = reader or BufferedReader()
        try:
            files = files or self._reader.files(folder)
            self._stored = _all_tensors(files, self._reader)
        except CheckpointError:
            self._reader.close()
            raise
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
        self._mapping = threading.Lock()
        self._pinned = PinnedReaders()

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
        if target.device.type != "cpu" and self._reader.maps:
            self._pinned.copy(
                stored.path,
                stored.offset,
                dtype=TORCH_DTYPES[stored.dtype],
                shape=shape,
                source=source,
                target=target,
            )
            return
        dtype = TORCH_DTYPES[stored.dtype]
        plain = target.device.type == "cpu" and target.is_contiguous()
        if plain and dtype == target.dtype and _are_rows(shape, source):
            row = math.prod(shape[1:]) * dtype.itemsize
            rows = source[0] if source else slice(None)
            first, last, _ = rows.indices(shape[0] if shape else 1)
            assert target.nbytes == (last - first) * row, (stored, target.shape, source)
            view = memoryview(target.reshape(-1).view(torch.uint8).numpy())
            self._reader.read(stored.path, stored.offset + first * row, view)
            return
        if not self._reader.maps:
            self._copy_rows(stored, shape, source, target)
            return
        data = self._map(stored.path)[stored.offset : stored.offset + stored.num_bytes]
        if stored.offset % dtype.itemsize:
            data = data.clone()
        target.copy_(data.view(dtype).view(shape)[source])

    def _copy_rows(
        self,
        stored: StoredTensor,
        shape: tuple[int, ...],
        source: tuple[slice, ...],
        target: torch.Tensor,
    ) -> None:
        """The same by whole rows in memory of its own, some at a time."""
        dtype = TORCH_DTYPES[stored.dtype]
        shape, source = shape or (1,), source or (slice(0, 1),)
        rows = range(shape[0])[source[0]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, ROWS_BYTES // max(1, row_bytes))
        into = target if target.dim() else target.view(1)
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            raw = torch.empty(count * row_bytes, dtype=torch.uint8)
            at = stored.offset + rows[start] * row_bytes
            self._reader.read(stored.path, at, memoryview(raw.numpy()))
            part = raw.view(dtype).view(count, *shape[1:])[(slice(None), *source[1:])]
            into[start : start + count].copy_(part)

    def content(self, name: str) -> bytes:
        """All bytes of a small tensor."""
        stored = self._stored[name]
        content = bytearray(stored.num_bytes)
        self._reader.read(stored.path, stored.offset, memoryview(content))
        return bytes(content)

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
        self._pinned.close()
        self._reader.close()

    def _map(self, path: Path) -> torch.Tensor:
        with self._mapping:
            if path not in self._maps:
                self._maps[path] = _mapped(path)
            return self._maps[path]


def _all_tensors(files: WeightFiles, reader: Reader) -> dict[str, StoredTensor]:
    """The tensors of all files; one that is in two files, or not where the index says, is
    refused."""
    stored_tensors: dict[str, StoredTensor] = {}
    for path in files.files:
        prefix = files.prefixes.get(path, "")
        for own, stored in reader.header(path).items():
            name = prefix + own
            if name in stored_tensors:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in {stored_tensors[name].path.name} too"
                )
            stored_tensors[name] = stored
    if files.weight_map is not None:
        own = {n: one for n, one in stored_tensors.items() if one.path not in files.prefixes}
        _check_index(files.weight_map, own)
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


def _are_rows(shape: tuple[int, ...], source: tuple[slice, ...]) -> bool:
    """Whether the rectangle is one piece of the file: whole rows without gaps."""
    cuts = [cut.indices(size) for cut, size in zip(source, shape, strict=False)]
    return all(step == 1 for _, _, step in cuts) and all(
        cut == (0, size, 1) for cut, size in zip(cuts[1:], shape[1:], strict=False)
    )


def _mapped(path: Path) -> torch.Tensor:
    """The file as bytes. A private map counts as writable, which torch asks for; nothing is ever
    written to it."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(data, dtype=torch.uint8)
