"""Where a checkpoint's tensors come from: the one thing the loader knows about a file format.

A source lists its tensors with names as transformers publishes them, and copies a rectangle of one
into memory that the model owns. Everything a format can get wrong is refused when the source is
opened, before any weight is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gguf_kept import KEPT_TYPES
from headrace.base.config.quantization import Numbers
from headrace.base.config.quantization_activations import Activations

HOST = torch.device("cpu")
PLAIN = ("F64", "F32", "F16", "BF16")
"""Types that hold plain floats."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor of a checkpoint. `where` names its file for messages; `order` is its place in the
    files.

    `dequantized` means that the source turns the values into floats (a quantized GGUF type); else
    `dtype` is stored as is. `squeezed` means that the format drops dimensions of size 1, so shapes
    are compared without them. `scheme` names the one of back/quant/scheme.py that holds a quantized
    matrix as it is; "": none. `activations`: how its checkpoint would have the matrix' inputs
    quantized; `input_scale`: it holds a scale for them.
    """

    shape: tuple[int, ...]
    dtype: str
    where: str
    order: tuple[int, int] = (0, 0)
    dequantized: bool = False
    squeezed: bool = False
    scheme: str = ""
    activations: Activations | None = None
    input_scale: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the values are stored quantized."""
        return self.dequantized and self.dtype not in PLAIN

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether this is the tensor a model wants as `shape`."""
        if not self.squeezed:
            return self.shape == shape
        return [n for n in self.shape if n != 1] == [n for n in shape if n != 1]


class Source(Protocol):
    """An opened checkpoint. `where` is the folder or file that messages name."""

    where: str
    entries: Mapping[str, CheckpointTensor]

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """Writes `tensor[source]` to `target`, in target's dtype; `shape` is the whole shape the
        model states."""
        ...

    def blocks(self, name: str) -> StoredRows:
        """The tensor's blocks as they are stored, without a copy; only of formats
        that have them."""
        ...

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """The numbers of a quantized matrix's rectangle, and what they are; only where the entry
        has a `scheme`."""
        ...

    def close(self) -> None:
        """Lets go of the files."""
        ...


def renamed(source: Source, names: tuple[tuple[str, str], ...]) -> Source:
    """The source by the model's names, where it has others (`WeightPlan.renamed`)."""
    return RenamedSource(source, names) if names else source


def name_of(name: str, names: tuple[tuple[str, str], ...]) -> str:
    """What the model calls a tensor of a checkpoint."""
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    return name


class RenamedSource:
    """A source by other names of its tensors."""

    def __init__(self, source: Source, names: tuple[tuple[str, str], ...]) -> None:
        self._source = source
        self._stored = {name_of(name, names): name for name in source.entries}
        self.where = source.where
        self.entries = {name: source.entries[stored] for name, stored in self._stored.items()}

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """See Source."""
        self._source.copy(self._stored[name], shape, source, target)

    def blocks(self, name: str) -> StoredRows:
        """See Source."""
        return self._source.blocks(self._stored[name])

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """See Source."""
        return self._source.groups(self._stored[name], source, device)

    def close(self) -> None:
        """See Source."""
        self._source.close()


FUSED = (
    ("experts.gate_up_proj", ("gate_proj", "up_proj")),
    ("experts.down_proj", ("down_proj",)),
    *((f"experts.{one}.weight", (one,)) for one in ("gate_proj", "up_proj", "down_proj")),
    *((f"experts.{one}.weight", (one,)) for one in ("gate", "up", "down", "w1", "w2", "w3")),
    *((f"switch_mlp.{one}.weight", (one,)) for one in ("gate_proj", "up_proj", "down_proj")),
)
"""Tensors of all experts of a layer [X, O, I], and the matrices of one expert that lie in O."""

STACKED = ((".attn.x_x", tuple(f".attn.x_{letter}" for letter in "rwkvag")),)
"""Tensors that hold several one behind the other, and their names (RWKV 7)."""


def separate_experts(source: Source, wanted: Collection[str]) -> Source:
    """The source with a tensor for each expert, and for each of those stacked, where the model
    wants that and the checkpoint has one for all."""
    parts: dict[str, ExpertPart] = {}
    for name, entry in source.entries.items():
        for ending, matrices in FUSED:
            stem = name.removesuffix(ending)
            first = f"{stem}experts.0.{matrices[0]}.weight"
            if stem == name or first not in wanted or len(entry.shape) != 3:
                continue
            count, rows = entry.shape[0], entry.shape[1] // len(matrices)
            for i in range(count):
                for place, matrix in enumerate(matrices):
                    one = f"{stem}experts.{i}.{matrix}.weight"
                    parts[one] = ExpertPart(name=name, expert=i, first=place * rows, rows=rows)
        for ending, names in STACKED:
            stem = name.removesuffix(ending)
            if stem != name and stem + names[0] in wanted and len(entry.shape) == 4:
                for i, one in enumerate(names[: entry.shape[0]]):
                    parts[stem + one] = ExpertPart(name=name, expert=i, first=0, rows=1)
    return SeparatedSource(source, parts) if parts else source


@dataclass(frozen=True, kw_only=True)
class ExpertPart:
    """Rows `first .. first + rows` of an expert, or of one of those stacked, within the tensor of
    all."""

    name: str
    expert: int
    first: int
    rows: int

    def place(self, source: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where a rectangle of it lies within the tensor of all."""
        rows, *columns = source
        first = self.first + (rows.start or 0)
        last = self.first + (self.rows if rows.stop is None else rows.stop)
        return slice(self.expert, self.expert + 1), slice(first, last), *columns


class SeparatedSource:
    """A source with a tensor for each expert instead of one for all."""

    def __init__(self, source: Source, parts: Mapping[str, ExpertPart]) -> None:
        self._source, self._parts = source, parts
        self.where = source.where
        fused = {part.name for part in parts.values()}
        kept = {name: entry for name, entry in source.entries.items() if name not in fused}
        for name, part in parts.items():
            entry = source.entries[part.name]
            # What other formats keep of three dimensions lies otherwise.
            scheme = entry.scheme if entry.dtype.partition(" ")[2].startswith("mlx") else ""
            if entry.dtype in KEPT_TYPES:
                scheme = KEPT_TYPES[entry.dtype].scheme
            kept[name] = replace(entry, shape=(part.rows, *entry.shape[2:]), scheme=scheme)
        self.entries: Mapping[str, CheckpointTensor] = kept

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """See Source."""
        part = self._parts.get(name)
        if part is None:
            self._source.copy(name, shape, source, target)
            return
        whole = self._source.entries[part.name].shape
        self._source.copy(part.name, whole, part.place(source), target[None])

    def blocks(self, name: str) -> StoredRows:
        """See Source."""
        part = self._parts.get(name)
        if part is None:
            return self._source.blocks(name)
        rows = self._source.blocks(part.name)
        whole = self._source.entries[part.name].shape[1]
        data = rows.data.reshape(len(rows.data) * whole, -1)
        first = part.expert * whole + part.first
        return StoredRows(data[first : first + part.rows], np.arange(part.rows))

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """See Source."""
        part = self._parts.get(name)
        if part is None:
            return self._source.groups(name, source, device)
        return self._source.groups(part.name, part.place(source), device)

    def close(self) -> None:
        """See Source."""
        self._source.close()
