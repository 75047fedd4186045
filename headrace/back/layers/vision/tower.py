"""The vision towers of the Qwen families: patches, layers that attend within each frame (or within
windows of it), a merger.

Every rank computes the whole tower. N patches, M tokens, E width of the tower, F of the decoder, R
rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headrace.back.kernels.patch_places.op import OP as POSITIONS
from headrace.back.kernels.patch_places.op import (
    TURNS_OP as TURNS,
)
from headrace.back.kernels.patch_places.op import (
    PatchPositionsProblem,
    PatchTurnsProblem,
    Taps,
    Turns,
    bilinear,
    rows_then_columns,
)
from headrace.back.kernels.upload import planned
from headrace.back.layers.norm import BlockNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.layers.vision.encoder import Grid, Passes, run_through
from headrace.back.layers.vision.grids import frame_lengths, starts_of, window_order
from headrace.back.layers.vision.layer import TokenSpans, VisionLayer, VisionLayerSpec
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm


class TowerMerger(Protocol):
    """x_NE -> y_MF."""

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """N rows in windows, each of which becomes one."""
        ...


class TowerMergerSpec(Protocol):
    """What leads to the decoder, as data of its tower."""

    @property
    def merge(self) -> int:
        """Patches per side of a window."""
        ...

    @property
    def outputs(self) -> int:
        """F."""
        ...

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> TowerMerger:
        """`scope` is the tower's; `norm_merged`: see MergerSpec."""
        ...


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """positions: rows of a learned table of places, a square, resampled for each grid by `taps`
    (grids.py); 0: none. before, behind: norms around the layers, the first of the patches alone.
    theta, turns: of the rotation. window: merged windows a side that all layers but `full_layers`
    attend within; None: all attend within the frame. deepstack: layers whose output, merged by the
    merger of this place in the list, is added behind the first decoder layers. summed: layers whose
    outputs, one behind the other, are what is normed and merged (summed.py). video: whether it
    takes video too, at most `max_t` steps of it an input, `positions_per_s` of which take one of
    the decoder's positions. clips: the patches of all steps of an input attend to each other, the
    steps of video are told apart by sines, and become the mean of them in the end; table_name: of
    the positions below their module."""

    patches: PatchSpec
    layer: VisionLayerSpec
    layers: int
    merger: TowerMergerSpec
    positions: int = 0
    taps: Taps = bilinear
    theta: float = 10_000.0
    turns: Turns = rows_then_columns
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    video: bool = True
    max_t: int = 65_536
    positions_per_s: float = 0.0
    clips: bool = False
    table_name: str = "weight"
    square_table: bool = False
    before: str | None = None
    behind: str | None = None
    names: tuple[str, str, str, str] = ("blocks", "merger", "deepstack_merger_list", "pos_embed")


class VisionTower:
    """`MediaEncoder` by a TowerSpec; `scope` is the tower's own."""

    def __init__(self, scope: Scope, spec: TowerSpec, rope: AxesRope | None) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._spec = spec
        self._scope = scope
        layers, merger, deepstack, positions = spec.names
        self._patches = PatchEmbedding(scope, spec.layer.width, spec.patches)
        self._positions = None
        if spec.positions:
            side = int(spec.positions**0.5)
            table = (side, side) if spec.square_table else (spec.positions,)
            shape = (*table, spec.layer.width)
            self._positions = (scope / positions).param(spec.table_name, shape)
        self._layers = [
            VisionLayer(scope / layers / str(index), spec.layer) for index in range(spec.layers)
        ]
        self._before, self._behind = (
            None if name is None else _norm(scope / name, spec.layer)
            for name in (spec.before, spec.behind)
        )
        self._merger = spec.merger.build(scope, merger)
        self._deepstack = [
            spec.merger.build(scope / deepstack, str(index), norm_merged=True)
            for index in range(len(spec.deepstack))
        ]
        self.forms = _forms(spec)
        self.width = spec.merger.outputs
        self.layers = len(spec.deepstack)
        self.dtype = scope.dtype
        self.rope = rope
        self._table_PE = torch.empty(0)
        self._add_positions = self._turns = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        spec, merge, layer = self._spec, self._spec.merger.merge, self._spec.layer
        if self._positions is not None:
            self._table_PE = self._positions.take().view(-1, layer.width).contiguous()
            places = PatchPositionsProblem(
                device=self._scope.kind,
                dtype=self._scope.dtype,
                width=layer.width,
                merge=merge,
                side=int(spec.positions**0.5),
                taps=spec.taps,
            )
            self._add_positions = self._scope.bind(POSITIONS, places)
        if layer.rotary:
            turns = PatchTurnsProblem(
                device=self._scope.kind,
                head_dim=layer.head_dim,
                merge=merge,
                theta=spec.theta,
                turns=spec.turns,
            )
            self._turns = self._scope.bind(TURNS, turns)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        return run_through(self.passes(kind, rows_NB, grids))

    def rests(self, kind: str) -> int:
        """See RestingEncoder: behind each layer but the last."""
        return max(0, len(self._layers) - 1)

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        spec, merge = self._spec, self._spec.merger.merge
        x_NE = self._patches.embed(rows_NB)
        if self._before is not None:
            x_NE = self._before.norm(x_NE)
        if spec.positions:
            self._add_positions(x_NE, self._table_PE, grids)
        if spec.clips:
            x_NE += planned(_time_sines(grids, spec.layer.width), x_NE.device).to(x_NE.dtype)
        table_NR = self._turns(grids, x_NE.device) if spec.layer.rotary else None
        lengths = [t * h * w for t, h, w in grids] if spec.clips else frame_lengths(grids)
        frames = starts_of(lengths)
        order_M: torch.Tensor | None = None
        windows = frames
        if spec.window is not None:
            order, lengths = window_order(grids, merge, spec.window)
            windows = starts_of(lengths)
            order_M = planned(order, x_NE.device)
            x_NE = _by_window(x_NE, order_M, merge)
            table_NR = None if table_NR is None else _by_window(table_NR, order_M, merge)
        place_N = None if table_NR is None else torch.arange(len(x_NE), device=x_NE.device)
        full = TokenSpans(starts=frames, table_NR=table_NR, place_N=place_N)
        local = replace(full, starts=windows)
        seen_NE: dict[int, torch.Tensor] = {}
        deep_MF: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            if index:
                yield
            x_NE = layer.forward(x_NE, full if index in spec.full_layers else local)
            if index in spec.deepstack:
                deep_MF.append(self._deepstack[spec.deepstack.index(index)].merge(x_NE))
            if index in spec.summed:
                seen_NE[index] = x_NE
        if spec.summed:
            x_NE = torch.cat([seen_NE[index] for index in spec.summed])
        if self._behind is not None:
            x_NE = self._behind.norm(x_NE)
        if spec.clips:
            x_NE = _means_of_steps(x_NE, grids)
        y_MF = self._merger.merge(x_NE)
        if order_M is not None:
            y_MF = torch.empty_like(y_MF).index_copy_(0, order_M, y_MF)
        return torch.cat((y_MF, *deep_MF), dim=1) if deep_MF else y_MF


def _norm(scope: Scope, spec: VisionLayerSpec) -> BlockNorm:
    return spec.norm.build(scope, spec.width, eps=spec.eps)


def _time_sines(grids: Sequence[Grid], width: int) -> torch.Tensor:
    """float32 [N, E]: the sines, then the cosines of each patch's step; nothing for one step."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / 10_000.0**exponents
    parts = []
    for t, h, w in grids:
        angles = torch.arange(t, dtype=torch.float32)[:, None] * frequencies
        sines_TE = torch.cat((angles.sin(), angles.cos()), dim=1) * (t > 1)
        parts.append(sines_TE.repeat_interleave(h * w, dim=0))
    return torch.cat(parts)


def _means_of_steps(x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Of each place over all steps of its input."""
    parts = x_NE.split([t * h * w for t, h, w in grids])
    means = [
        part.unflatten(0, (grid[0], -1)).mean(0) for part, grid in zip(parts, grids, strict=True)
    ]
    return torch.cat(means)


def _by_window(x_NE: torch.Tensor, order_M: torch.Tensor, merge: int) -> torch.Tensor:
    return x_NE.view(-1, merge**2, x_NE.shape[1]).index_select(0, order_M).flatten(0, 1)


def _forms(spec: TowerSpec) -> tuple[MediaForm, ...]:
    patches, merge = spec.patches, spec.merger.merge
    image = MediaForm(
        kind="image", row_bytes=patches.row_bytes, patch=patches.patch, merge=merge, max_t=1
    )
    video = MediaForm(
        kind="video",
        row_bytes=patches.row_bytes * patches.frames,
        patch=patches.patch,
        frames=patches.frames,
        merge=merge,
        max_t=spec.max_t,
        positions_per_s=spec.positions_per_s,
        mean_t=spec.clips,
        prunes=not spec.clips,
    )
    return (image, video) if spec.video else (image,)
