"""What a built model wants from a checkpoint, as data: the seam between model families and the
loader.

A family states each parameter once: its global shape, the checkpoint tensors it is put together
from, and how it is split over ranks. `copies` turns that into plain rectangles to copy; the loader
needs no more. Names are those of the checkpoint as published (transformers' state dict names for
safetensors).

    model = build_model(spec, mesh, device, dtype)
    wanted = model.weights            # WeightPlan
    for param in wanted.params:
        for copy in copies(param):
            param.tensor[copy.target].copy_(checkpoint[copy.name][copy.source])
    model.finish_load()               # layers pack their weights and drop the plain ones
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter of a built model on this rank.

    name      the path inside the model, for messages
    shape     the global shape; `tensor` has the local one
    pieces    checkpoint tensors that cover the global shape exactly, without overlap
    shard     how it is split, None: every rank holds all of it
    spans     this rank's ranges along shard.dim, in local order; empty without a shard
    init      what `--load-format dummy` puts there: "normal" (times init_scale), "ones" or "zeros"
    optional  the checkpoint may lack all its pieces; then `init` is applied
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor = field(repr=False)
    shard: Shard | None = None
    spans: tuple[Span, ...] = ()
    init: str = "normal"
    init_scale: float = 0.02
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """All parameters of a model, and the checkpoint names that may be there without being wanted.

    `ignored` are regular expressions that match whole names (rotary inv_freq buffers, a tied
    lm_head ...).
    """

    params: tuple[Param, ...]
    ignored: tuple[str, ...] = ()


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
