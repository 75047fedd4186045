"""A parameter as data: its global shape, the checkpoint tensors it is put together from, and its
split.

`copies` turns that into rectangles to copy, so that a loader reads only the slices this rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.back.parallel.shard import Shard, Span


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A checkpoint tensor that fills rows `offset .. offset + shape[dim]` of dimension `dim` of a
    parameter.

    `shape` is the tensor's whole shape in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    offset: int = 0


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A tensor as its checkpoint holds it, in quantized blocks: `data` uint8 [rows, bytes]; row i of the tensor is
    data[order[i]] (int64), which is how a format's own order of rows is undone."""

    data: np.ndarray
    order: np.ndarray


@dataclass(kw_only=True, eq=False)
class Param:
    """A parameter of a built model on this rank.

    name      the path inside the model, for messages
    shape     the global shape; `tensor` has the local one
    pieces    checkpoint tensors that cover the global shape exactly, without overlap
    shard     how it is split, None: every rank holds all of it
    spans     this rank's ranges along shard.dim, in local order; empty without a shard
    init      what `--load-format dummy` puts there: "normal" (times init_scale), "ones" or "zeros"
    optional  the checkpoint may lack all its pieces; then `init` is applied
    tensor    where the loader writes; None once it has been packed (so that it is held once)
    on_blocks takes stored blocks instead of floats: (copy, rows) -> the first row of the tensor with a scale that is
              no finite number, or None; such a parameter has no tensor
    on_filled   what the layer wants done as soon as the last piece is written; see `filled`
    packed_bytes  what this rank's weight takes once on_filled has packed it; 0: it is kept as it is
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor | None = field(repr=False)
    shard: Shard | None = None
    spans: tuple[Span, ...] = ()
    init: str = "normal"
    init_scale: float = 0.02
    optional: bool = False
    on_blocks: Callable[[Copy, StoredRows], int | None] | None = field(default=None, repr=False)
    on_filled: Callable[[], None] | None = field(default=None, repr=False)
    packed_bytes: int = 0

    def filled(self) -> None:
        """The loader calls this once it has written all of `tensor`; a layer may then pack it."""
        if self.on_filled is not None:
            self.on_filled()

    def take(self) -> torch.Tensor:
        """The loaded tensor, which the parameter gives up: the layer that packs it is then its only
        owner."""
        assert self.tensor is not None, f"{self.name} was taken before"
        tensor, self.tensor = self.tensor, None
        return tensor


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy `checkpoint[name][source]` to `param.tensor[target]`; both rectangles have the same
    shape."""

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def copies(param: Param) -> Iterator[Copy]:
    """The copies that fill `param.tensor` on this rank; `shape` is the checkpoint tensor's whole
    shape."""
    for piece in param.pieces:
        yield from _piece_copies(param, piece)


def _piece_copies(param: Param, piece: Piece) -> Iterator[Copy]:
    if not piece.shape:
        yield Copy(name=piece.name, shape=(), source=(), target=())
        return
    whole = [slice(0, size) for size in piece.shape]
    if param.shard is None:
        target = list(whole)
        target[piece.dim] = slice(piece.offset, piece.offset + piece.shape[piece.dim])
        yield Copy(name=piece.name, shape=piece.shape, source=tuple(whole), target=tuple(target))
        return
    for span in param.spans:
        copy = _span_copy(param.shard.dim, piece, span, whole)
        if copy is not None:
            yield copy


def _span_copy(split: int, piece: Piece, span: Span, whole: list[slice]) -> Copy | None:
    """The part of `piece` that falls into `span` of the split dimension."""
    offset = piece.offset if piece.dim == split else 0
    start = max(span.start, offset)
    stop = min(span.start + span.size, offset + piece.shape[split])
    if start >= stop:
        return None
    source, target = list(whole), list(whole)
    if piece.dim != split:
        target[piece.dim] = slice(piece.offset, piece.offset + piece.shape[piece.dim])
    source[split] = slice(start - offset, stop - offset)
    local = span.local + start - span.start
    target[split] = slice(local, local + stop - start)
    return Copy(name=piece.name, shape=piece.shape, source=tuple(source), target=tuple(target))
