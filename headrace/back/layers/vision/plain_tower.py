"""Vision towers with a place of its own for each patch: a table for one size of image (CLIP,
Radford et al. 2021; SigLIP, Zhai et al. 2023; InternViT, Chen et al. 2023), or places that turn
queries and keys at any size (Pixtral, Agrawal et al. 2024). All patches of a t attend to each
other.

Every rank computes the whole tower. N patches, M tokens, E width of the tower, F of the decoder, R
rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import Turns, coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.layers.vision.encoder import Grid, Passes, run_through
from headrace.back.layers.vision.grids import frame_lengths, nearest, starts_of
from headrace.back.layers.vision.layer import TokenSpans, VisionLayer, VisionLayerSpec
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.layers.vision.turns import alternating
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, Packing


class Projector(Protocol):
    """x_NE -> y_MF: windows of patches to tokens."""

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """N rows in windows, each of which becomes one."""
        ...


@runtime_checkable
class GridProjector(Projector, Protocol):
    """A projector that looks beyond a window."""

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See Projector.merge; `grids`: of the inputs."""
        ...


@runtime_checkable
class MarkingProjector(Projector, Protocol):
    """A projector with the rows of `Packing.marks`, marks_KF."""

    marks: torch.Tensor


class ProjectorSpec(Protocol):
    """A projector as data of its tower."""

    merge: int
    outputs: int

    def build(self, scope: Scope) -> Projector:
        """`scope` is that of the whole checkpoint."""
        ...


@dataclass(frozen=True, kw_only=True)
class TowerNorm:
    """A norm before or behind the layers."""

    name: str
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class PlainTowerSpec:
    """side: patches a side of the one size there is; 0: any; filled: rows and columns of an input
    behind them, which nothing sees and which are zeros for the projector. positions: the table's
    name, a row for each patch, before them one for the class token if there is one, with
    `class_last` behind them, or `skipped` ones. table_side: patches a side of a table that is
    resized to each image; sides: the only ones such images have; resized: how, with `smooth`
    smoothed where it shrinks.
    class_token: its name and shape; `second` is that of one behind it, which the table has a row
    for too; it stands there `class_times`, sees and is seen, and is left
    out in the end, or with `class_alone` is all that is left, or with `class_kept` stands before
    the patches. prefix: learned rows that are seen likewise, without places.
    cropped: a resized table is that of a square around the image. shares: instead of being resized,
    the table gives each patch the place that its share of the image falls into. rows_each, extra,
    row_extra: see MediaForm. before, behind: norms around the layers. theta, turns: of the
    rotation, where layers rotate.
    layers_name: where the layers lie. frames: whether an input may have several t, each an image
    of its own (tiles). mutual: see MediaForm. embedded: a norm of the patches alone. packings: of
    the kinds whose inputs are cut; learned: the names of the row that ends rows and of the one that
    ends an input, of the checkpoint, in the decoder's width. taken: behind how many layers
    outputs are taken, side by side; empty: behind the last. averaged: kinds of whose windows of
    2 x 2 patches the means are projected. deep: decoder layers behind which the projector's further
    columns are added."""

    patches: PatchSpec
    layer: VisionLayerSpec
    layers: int
    projector: ProjectorSpec
    side: int = 0
    filled: int = 0
    table_side: int = 0
    skipped: int = 0
    sides: tuple[tuple[int, int], ...] = ()
    smooth: bool = True
    resized: str = "bilinear"
    positions: tuple[str, tuple[int, ...]] | None = None
    class_token: tuple[str, tuple[int, ...]] | None = None
    second: tuple[str, tuple[int, ...]] | None = None
    class_last: bool = False
    class_times: int = 1
    class_alone: bool = False
    class_kept: bool = False
    prefix: tuple[str, tuple[int, int]] | None = None
    cropped: bool = False
    shares: bool = False
    rows_each: int = 0
    extra: int = 0
    row_extra: int = 0
    before: TowerNorm | None = None
    behind: TowerNorm | None = None
    theta: float = 10_000.0
    turns: Turns = alternating
    layers_name: str = "encoder.layers"
    breaks: int = 0
    frames: bool = False
    mutual: str = ""
    embedded: TowerNorm | None = None
    packings: Mapping[str, Packing] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    taken: tuple[int, ...] = ()
    averaged: tuple[str, ...] = ()
    deep: int = 0


class PlainTower:
    """`MediaEncoder` by a PlainTowerSpec. `whole` is the scope of the checkpoint, `scope` the
    tower's."""

    def __init__(
        self, whole: Scope, scope: Scope, spec: PlainTowerSpec, rope: AxesRope | None = None
    ) -> None:
        self.rope = rope
        self.layers = spec.deep
        whole, scope = (replace(one, mesh=Mesh(), online=None) for one in (whole, scope))
        self._spec, self._scope = spec, scope
        width, eps = spec.layer.width, spec.layer.eps
        self._patches = PatchEmbedding(scope, width, spec.patches)
        self._positions = None if spec.positions is None else scope.param(*spec.positions)
        self._class = None if spec.class_token is None else scope.param(*spec.class_token)
        self._second = None if spec.second is None else scope.param(*spec.second)
        self._prefix = None if spec.prefix is None else scope.param(*spec.prefix)
        self._embedded, self._before, self._behind = (
            None if one is None else one.norm.build(scope / one.name, width, eps=eps)
            for one in (spec.embedded, spec.before, spec.behind)
        )
        self._layers = [
            VisionLayer(scope / spec.layers_name / str(index), spec.layer)
            for index in range(spec.layers)
        ]
        self._projector = spec.projector.build(whole)
        self._learned = {
            name: whole.param(name, (spec.projector.outputs,))
            for name in dict.fromkeys(spec.learned)
        }
        self._rows = dict[str, torch.Tensor]()
        self.forms = _forms(spec)
        self.width = spec.projector.outputs
        self.dtype = scope.dtype
        self._table_PE = torch.empty(0)
        self._first_KE = torch.empty(0, width)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        spec, width = self._spec, self._spec.layer.width
        learned = {name: param.take() for name, param in self._learned.items()}
        for kind, packing in spec.packings.items():
            if not spec.learned or not (packing.newline or packing.tails):
                continue
            names = [spec.learned[0]] * packing.newline + [spec.learned[-1]] * packing.tails
            self._rows[kind] = torch.stack([learned[name] for name in names])
        if self._positions is not None:
            self._table_PE = self._positions.take().view(-1, width)[spec.skipped :]
        if self._class is not None:
            own = -1 if spec.class_last else 0
            self._first_KE = self._class.take().view(1, width) + self._table_PE[own]
            self._first_KE = self._first_KE.repeat(spec.class_times, 1)
            self._table_PE = self._table_PE[:-1] if spec.class_last else self._table_PE[1:]
        if self._second is not None:
            second_1E = self._second.take().view(1, width) + self._table_PE[:1]
            self._first_KE = torch.cat((self._first_KE, second_1E))
            self._table_PE = self._table_PE[1:]
        if self._prefix is not None:
            self._first_KE = self._prefix.take()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        return run_through(self.passes(kind, rows_NB, grids))

    def rests(self, kind: str) -> int:
        """See RestingEncoder: behind each layer but the last."""
        return max(0, len(self._layers) - 1)

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        spec = self._spec
        merge = 2 if kind in spec.averaged else spec.projector.merge
        at_2N = np.concatenate([coordinates(grid, merge) for grid in grids], axis=1)
        lengths, whole = frame_lengths(grids), rows_NB.shape[0]
        seen_N = torch.empty(0)
        if spec.filled:
            seen = (at_2N < spec.side).all(0)
            seen_N, at_2N = planned(np.flatnonzero(seen), rows_NB.device), at_2N[:, seen]
            rows_NB, lengths = rows_NB.index_select(0, seen_N), [spec.side**2] * len(lengths)
        x_NE = self._patches.embed(rows_NB)
        if self._embedded is not None:
            x_NE = self._embedded.norm(x_NE)
        spans = TokenSpans(starts=starts_of(lengths))
        if spec.side:
            place_N = planned(at_2N[0] * spec.side + at_2N[1], x_NE.device)
            x_NE += self._table_PE.index_select(0, place_N)
        elif spec.shares:
            place_N = planned(nearest(at_2N, grids, lengths, spec.table_side), x_NE.device)
            x_NE += self._table_PE.index_select(0, place_N)
        elif spec.table_side:
            x_NE += torch.cat([self._resized(grid) for grid in grids])
        first = self._first_KE.shape[0]
        if first:
            x_NE = torch.cat([row for one in x_NE.split(lengths) for row in (self._first_KE, one)])
            spans = TokenSpans(starts=starts_of([first + length for length in lengths]))
        if spec.layer.rotary:
            spans = replace(spans, **self._rotation(at_2N, len(lengths)))
        if self._before is not None:
            x_NE = self._before.norm(x_NE)
        x_NE = yield from self._through(x_NE, spans)
        if first:
            own = slice(0, 1) if spec.class_alone else slice(0 if spec.class_kept else first, None)
            images = x_NE.split([first + length for length in lengths])
            x_NE = torch.cat([one[own] for one in images])
        if self._behind is not None:
            x_NE = self._behind.norm(x_NE)
        if spec.filled:
            x_NE = x_NE.new_zeros(whole, x_NE.shape[1]).index_copy_(0, seen_N, x_NE)
        if kind in spec.averaged:
            x_NE = x_NE.unflatten(0, (-1, merge**2)).mean(1)
        if isinstance(self._projector, GridProjector):
            y_MF = self._projector.merge_grids(x_NE, grids)
        else:
            y_MF = self._projector.merge(x_NE)
        parts = [y_MF, *([self._rows[kind]] if kind in self._rows else ())]
        if isinstance(self._projector, MarkingProjector):
            parts.append(self._projector.marks)
        return torch.cat(parts) if len(parts) > 1 else y_MF

    def _through(self, x_NE: torch.Tensor, spans: TokenSpans) -> Passes:
        taken = self._spec.taken
        outputs = {0: x_NE.clone()} if 0 in taken else {}
        for count, layer in enumerate(self._layers, 1):
            if count > 1:
                yield
            x_NE = layer.forward(x_NE, spans)
            if count in taken:
                outputs[count] = x_NE.clone()
        return torch.cat([outputs[count] for count in taken], dim=1) if taken else x_NE

    def _resized(self, grid: Grid) -> torch.Tensor:
        """The table at the size of an image, its patches in the order of rows (bilinear, with
        `smooth` smoothed where it shrinks: Tschannen et al. 2025, SigLIP 2)."""
        (t, h, w), side = grid, self._spec.table_side
        table = self._table_PE.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        smooth = self._spec.smooth
        size = (max(h, w),) * 2 if self._spec.cropped else (h, w)
        table = F.interpolate(table, size=size, mode=self._spec.resized, antialias=smooth)
        table = table[:, :, :h, :w]
        row_N, column_N = coordinates((1, h, w), self._spec.projector.merge)
        place_N = planned(row_N * w + column_N, table.device)
        resized_NE = table[0].flatten(1).T.index_select(0, place_N).to(self.dtype)
        return resized_NE.repeat(t, 1)

    def _rotation(self, at_2N: np.ndarray, count: int) -> dict[str, torch.Tensor]:
        place_2N = planned(at_2N, self._scope.device)
        spec = self._spec
        angles_NH = spec.turns(place_2N, spec.layer.head_dim, spec.theta)
        if self._class is not None:  # it does not turn
            angles_CPH = angles_NH.unflatten(0, (count, -1))
            angles_NH = F.pad(angles_CPH, (0, 0, 1, 0)).flatten(0, 1)
        table_NR = torch.cat((angles_NH.cos(), angles_NH.sin()), dim=1)
        place_N = torch.arange(table_NR.shape[0], device=table_NR.device)
        return {"table_NR": table_NR, "place_N": place_N}


def _forms(spec: PlainTowerSpec) -> tuple[MediaForm, ...]:
    image = MediaForm(
        kind="image",
        row_bytes=spec.patches.row_bytes,
        patch=spec.patches.patch,
        merge=spec.projector.merge,
        sides=((spec.side + spec.filled,) * 2,) if spec.side else spec.sides,
        breaks=spec.breaks,
        max_t=65_536 if spec.frames else 1,
        mutual=spec.mutual,
        rows_each=spec.rows_each,
        extra=spec.extra,
        row_extra=spec.row_extra,
    )
    cut = (
        msgspec.structs.replace(image, kind=kind, packing=packing)
        for kind, packing in spec.packings.items()
    )
    means = (
        msgspec.structs.replace(image, kind=kind, merge=2, max_t=65_536) for kind in spec.averaged
    )
    return (*(cut if spec.packings else (image,)), *means)
