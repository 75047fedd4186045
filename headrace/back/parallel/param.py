"""A parameter as data: its global shape, the checkpoint tensors it is put together from, and its
split. A parameter may be a bundle of tensors (bundle.py) which the same split cuts.

`copies` turns that into rectangles to copy, so that a loader reads only the slices this rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np
import torch

from headrace.back.parallel.bundle import Bundle, CutGroup
from headrace.back.parallel.mesh import OPTIONS
from headrace.back.parallel.shard import Shard, Span
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WeightPiece:
    """A checkpoint tensor that fills rows `offset .. offset + shape[dim]` of dimension `dim` of a
    parameter.

    `shape` is the tensor's whole shape in the checkpoint. `rows`: it fills them with a part of
    itself, (first, number) along `dim`. `transposed`: the checkpoint holds the matrix with its
    dimensions exchanged; `dim` and `rows` are those of the parameter. `scale`: what its values are
    multiplied with.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    offset: int = 0
    rows: tuple[int, int] | None = None
    transposed: bool = False
    scale: float = 1.0

    @property
    def source(self) -> list[slice]:
        """What of the tensor it takes, in the order of the parameter's dimensions."""
        whole = [
            slice(0, size) for size in (reversed(self.shape) if self.transposed else self.shape)
        ]
        if self.rows is not None:
            first, count = self.rows
            whole[self.dim] = slice(first, first + count)
        return whole


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A tensor as its checkpoint holds it, in quantized blocks: `data` uint8 [rows, bytes]; row i
    of the tensor is data[order[i]] (int64), which is how a format's own order of rows is undone."""

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
    tensor    where the loader writes; None once it has been packed (so that it is held once), and
              before the first write if it is `deferred`
    bundle    the tensors that stand for it, None: it is plain; `shape`, `pieces` and `shard` are
              those of the weight all the same, and `members` holds this rank's part of each tensor
    on_blocks takes stored blocks instead of floats: (copy, rows) -> the first row of the tensor
              with a scale that is no finite number, or None; such a parameter has no tensor
    on_groups takes the numbers of quantized tensors likewise: (copy, groups, what they are); they
              are read on device `groups_on`
    on_filled   what the layer wants done as soon as the last piece is written; see `filled`
    routed      of routed experts: how many there are, and how many a token takes
    as_float     once take_float was called: what it gave, and what was added
    packed_bytes  what this rank's weight takes once on_filled has packed it; 0: it is kept as it is
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[WeightPiece, ...]
    tensor: torch.Tensor | None = field(repr=False)
    shard: Shard | None = None
    spans: tuple[Span, ...] = ()
    init: str = "normal"
    init_scale: float = 0.02
    optional: bool = False
    on_blocks: Callable[[Copy, StoredRows], int | None] | None = field(default=None, repr=False)
    on_groups: Callable[..., int | None] | None = field(default=None, repr=False)
    groups_on: torch.device = field(default_factory=partial(torch.device, "cpu"))
    on_filled: Callable[[], None] | None = field(default=None, repr=False)
    routed: tuple[int, int] | None = None
    packed_bytes: int = 0
    bundle: Bundle | None = None
    members: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    as_float: tuple[torch.Tensor, float] | None = field(default=None, repr=False)
    _deferred: torch.device | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def defer(self) -> None:
        """Gives up the tensor until somebody writes it: of weights that are packed as soon as they
        are full, few are there at once."""
        assert self.tensor is not None, self.name
        self.tensor, self._deferred = None, self.tensor.device

    def present(self) -> torch.Tensor:
        """The tensor, made now if it was deferred."""
        with self._lock:
            if self.tensor is None and self._deferred is not None:
                shape, device = local_shape(self), self._deferred
                self.tensor = torch.empty(shape, dtype=self.dtype, device=device)
                self._deferred = None
        assert self.tensor is not None, f"{self.name} was taken before"
        return self.tensor

    def target(self, copy: Copy) -> torch.Tensor:
        """Where a copy goes: a view of the tensor, or of a member."""
        tensor = self.members[copy.member] if copy.member else self.present()
        view = tensor[copy.target]
        return view.t() if copy.transposed else view

    def take_members(self) -> dict[str, torch.Tensor]:
        """The loaded tensors of a bundle, which the parameter gives up."""
        assert self.members, f"{self.name} is no bundle, or was taken before"
        members, self.members = self.members, {}
        return members

    def filled(self) -> None:
        """The loader calls this once it has written all of `tensor`; a layer may then pack it."""
        if self.on_filled is not None:
            self.on_filled()

    def take(self) -> torch.Tensor:
        """The loaded tensor, which the parameter gives up: the layer that packs it is then its only
        owner."""
        tensor, self.tensor = self.present(), None
        return tensor

    def take_float(self, offset: float = 0.0) -> torch.Tensor:
        """The loaded values in float32, plus `offset`, which the layer keeps as they are."""
        values = self.take().float() + offset
        self.as_float = values, offset
        return values


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy `checkpoint[name][source]` to `param.tensor[target]`, or to that of `member`; both
    rectangles have the same shape, or exchanged dimensions if it is `transposed`. Floats are
    multiplied with `scale`."""

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice | int, ...]
    member: str = ""
    transposed: bool = False
    scale: float = 1.0


def copies(param: Param) -> Iterator[Copy]:
    """The copies that fill the parameter on this rank; `shape` is the checkpoint tensor's whole
    shape. ConfigError if the split cuts a group of a bundle."""
    for index, piece in enumerate(local_pieces(param)):
        for copy in _piece_copies(param, piece):
            if param.bundle is None:
                yield copy
            else:
                yield from _member_copies(param, param.bundle, index, copy)


def local_pieces(param: Param) -> tuple[WeightPiece, ...]:
    """The pieces of which this rank holds a part: not those of other ranks' experts."""
    return tuple(piece for piece in param.pieces if any(_piece_copies(param, piece)))


def member_name(piece: str, member: str) -> str:
    """The checkpoint's name of a member of the weight `piece`."""
    return piece.removesuffix("weight") + member


def local_shape(param: Param) -> tuple[int, ...]:
    """The weight's shape on this rank."""
    shape = list(param.shape)
    if param.shard is not None:
        shape[param.shard.dim] = sum(span.size for span in param.spans)
    return tuple(shape)


def _member_copies(param: Param, bundle: Bundle, index: int, copy: Copy) -> Iterator[Copy]:
    """One copy of the weight as copies of its tensors; `index`: which of this rank's pieces."""
    local = local_shape(param)
    for member in bundle.members:
        try:
            source = member.cut(copy.source, copy.shape)
            target: tuple[slice | int, ...] = member.cut(_slices(copy.target), local)
        except CutGroup as error:
            raise cut_error(param, copy.name, error) from error
        yield Copy(
            name=member_name(copy.name, member.name),
            shape=member.shape(copy.shape),
            source=source,
            target=(index, *target) if member.per_piece else target,
            member=member.name,
        )


def _slices(target: tuple[slice | int, ...]) -> tuple[slice, ...]:
    return tuple(part if isinstance(part, slice) else slice(part, part + 1) for part in target)


def cut_error(
    param: Param, name: str, error: CutGroup, what: str = "quantization group"
) -> ConfigError:
    """What a user is told whose split cuts a group of a quantized weight."""
    option = OPTIONS[param.shard.axis] if param.shard is not None else "tensor_parallel"
    along = ("outputs", "inputs")[error.dim] if len(param.shape) == 2 else f"dimension {error.dim}"
    return ConfigError(
        f"--{option.replace('_', '-')} gives a rank {along} {error.start} to {error.stop} of {name}: "
        f"that cuts a {what} of {error.per}; its {error.size} {along} are "
        f"{-(-error.size // error.per)} of them",
        field=option,
    )


def _piece_copies(param: Param, piece: WeightPiece) -> Iterator[Copy]:
    if not piece.shape:
        yield Copy(name=piece.name, shape=(), source=(), target=())
        return
    source = piece.source
    target = [slice(0, part.stop - part.start) for part in source]
    target[piece.dim] = slice(piece.offset, piece.offset + target[piece.dim].stop)
    if param.shard is None:
        yield _copy(piece, source, target)
        return
    split = param.shard.dim
    for span in param.spans:
        start = max(span.start, target[split].start)
        stop = min(span.start + span.size, target[split].stop)
        if start >= stop:
            continue
        first, local = source[split].start - target[split].start, span.local - span.start
        yield _copy(
            piece,
            [*source[:split], slice(first + start, first + stop), *source[split + 1 :]],
            [*target[:split], slice(local + start, local + stop), *target[split + 1 :]],
        )


def _copy(piece: WeightPiece, source: list[slice], target: list[slice]) -> Copy:
    return Copy(
        name=piece.name,
        shape=piece.shape,
        source=tuple(reversed(source) if piece.transposed else source),
        target=tuple(target),
        transposed=piece.transposed,
        scale=piece.scale,
    )
