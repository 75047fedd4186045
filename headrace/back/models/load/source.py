"""Where a checkpoint's tensors come from: the one thing the loader knows about a file format.

A source lists its tensors with names as transformers publishes them, and copies a rectangle of one
into memory that the model owns. Everything a format can get wrong is refused when the source is
opened, before any weight is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.parallel.param import StoredRows

PLAIN = ("F64", "F32", "F16", "BF16")
"""Types that hold plain floats."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor of a checkpoint. `where` names its file for messages; `order` is its place in the
    files.

    `dequantized` means that the source turns the values into floats (a quantized GGUF type); else
    `dtype` is stored as is. `squeezed` means that the format drops dimensions of size 1, so shapes
    are compared without them.
    """

    shape: tuple[int, ...]
    dtype: str
    where: str
    order: tuple[int, int] = (0, 0)
    dequantized: bool = False
    squeezed: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the source can give the stored blocks (`Source.blocks`)."""
        return self.squeezed and self.dequantized and self.dtype not in PLAIN

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
        """The tensor's blocks as they are stored, without a copy; only where the entry has
        `blocks`."""
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

    def close(self) -> None:
        """See Source."""
        self._source.close()
