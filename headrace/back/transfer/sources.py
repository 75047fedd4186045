"""Where new weights come from, as a loader sees them: files, and tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from headrace.back.models.load.quantized import QuantizedSource
from headrace.back.models.load.safetensors import TORCH_DTYPES, SafetensorsSource
from headrace.back.models.load.source import HOST, CheckpointTensor, Source
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.quantization import Numbers
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError, InvalidRequest

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TensorSource:
    """Tensors in memory, by their checkpoint names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        self.where = where
        self._tensors = tensors
        self.entries: Mapping[str, CheckpointTensor] = {
            name: CheckpointTensor(
                shape=tuple(tensor.shape),
                dtype=NAMES[tensor.dtype],
                where=where,
                order=(0, number),
            )
            for number, (name, tensor) in enumerate(tensors.items())
        }

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """See Source."""
        target.copy_(self._tensors[name].view(shape)[source])

    def tensor(self, name: str) -> torch.Tensor:
        """Where it lies."""
        return self._tensors[name]

    def content(self, name: str) -> bytes:
        """All bytes of a small tensor."""
        tensor = self._tensors[name].cpu().contiguous()
        return bytes(tensor.view(-1).view(torch.uint8).numpy())

    def blocks(self, name: str) -> StoredRows:
        """There are none in memory."""
        raise AssertionError(f"{name} is not stored in blocks")

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """There are none in memory."""
        raise AssertionError(f"{name} is not stored in groups")

    def close(self) -> None:
        """Lets go of the tensors."""
        self._tensors = {}


def as_stored(files: TensorSource | SafetensorsSource, spec: ModelSpec) -> Source:
    """The same tensors, the quantized weights among them under their own names."""
    quantization = stored_quantization(spec.config, "config.json")
    if quantization is None:
        return files
    return QuantizedSource(cast("SafetensorsSource", files), quantization)


def read_safetensors(path: str) -> SafetensorsSource:
    """The safetensors files of a folder, or one file; InvalidRequest if they cannot be read."""
    try:
        return SafetensorsSource(Path(path))
    except (CheckpointError, OSError) as error:
        what = error.message if isinstance(error, CheckpointError) else str(error)
        raise InvalidRequest(f"model_path: {what}", field="model_path") from None


def cut_buffer(
    buffer: torch.Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> dict[str, torch.Tensor]:
    """Tensors that lie one after another in a buffer uint8 [bytes]."""
    tensors = {}
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = dtype_of(dtype)
        count = math.prod(shape) * kind.itemsize
        piece = buffer[start : start + count]
        if start % kind.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(kind).view(shape)
        start += count
    return tensors


def num_bytes_of(dtypes: list[str], shapes: list[list[int]]) -> int:
    """The bytes of tensors of these types and shapes."""
    return sum(
        math.prod(shape) * dtype_of(dtype).itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    )


def dtype_of(name: str) -> torch.dtype:
    """A type by torch's name (float32, torch.bfloat16) or by that of safetensors."""
    short = name.removeprefix("torch.")
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in TORCH_DTYPES.values()}
    kind = TORCH_DTYPES.get(short) or by_name.get(short)
    if kind is None:
        known = ", ".join(sorted(by_name))
        raise InvalidRequest(f"dtypes: {name!r:.50} given; known are {known}", field="dtypes")
    return kind
