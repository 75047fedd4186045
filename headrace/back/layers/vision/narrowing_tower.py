"""A tower that goes on with a quarter of its patches behind one of its layers: the patches of a
window attend to each other, and their mean with an MLP's output stays (MiniCPM-V 4.6). Behind it
windows of what is left are merged again.

N patches, E width, F of the decoder. Rows lie in nested windows: four that are merged stand
together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.grids import frame_lengths, nearest, starts_of
from headrace.back.layers.vision.layer import (
    TokenSpans,
    VisionAttention,
    VisionLayer,
    VisionLayerSpec,
)
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm

WINDOW = 4
MERGER_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class NarrowingTowerSpec:
    """side: of the table of places. narrowed: behind which layer windows are merged; None: all
    patches go through. rounds: how often they are merged behind the tower. outputs: F."""

    patches: PatchSpec
    layer: VisionLayerSpec
    layers: int
    side: int
    narrowed: int | None
    rounds: int
    outputs: int


class NarrowingTower:
    """`MediaEncoder` by a NarrowingTowerSpec. `whole` is the scope of all but the decoder, `scope`
    the tower's."""

    rope = None
    layers = 0

    def __init__(self, whole: Scope, scope: Scope, spec: NarrowingTowerSpec) -> None:
        whole, scope = (replace(one, mesh=Mesh(), online=None) for one in (whole, scope))
        self._spec = spec
        width, eps = spec.layer.width, spec.layer.eps
        self._patches = PatchEmbedding(scope, width, spec.patches)
        table = scope / "embeddings.position_embedding"
        self._positions = table.param("weight", (spec.side**2, width))
        self._layers = [
            VisionLayer(scope / "encoder.layers" / str(index), spec.layer)
            for index in range(spec.layers)
        ]
        self._narrowing = None
        if spec.narrowed is not None:
            self._narrowing = _Narrowing(scope / "vit_merger", spec.layer)
        self._behind = LAYER.build(scope / "post_layernorm", width, eps=eps)
        sizes = [width] * (spec.rounds - 1) + [spec.outputs]
        self._mergers = [
            _Merger(whole / f"merger.mlp.{i}", width, WINDOW * width, size, "gelu", MERGER_EPS)
            for i, size in enumerate(sizes)
        ]
        self._merge = 2 ** (spec.rounds + (self._narrowing is not None))
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=spec.patches.row_bytes,
                patch=spec.patches.patch,
                merge=self._merge,
                max_t=1,
            ),
        )
        self.width = spec.outputs
        self.dtype = scope.dtype
        self._table_PE = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._table_PE = self._positions.take()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        spec = self._spec
        order = _nested(self._merge)
        x_NE = self._patches.embed(rows_NB)
        x_NE = x_NE.unflatten(0, (-1, self._merge**2))[:, order].flatten(0, 1)
        at_2N = np.concatenate([coordinates(grid, self._merge) for grid in grids], axis=1)
        at_2N = at_2N.reshape(2, -1, self._merge**2)[:, :, order].reshape(2, -1)
        lengths = frame_lengths(grids)
        place_N = nearest(at_2N, grids, lengths, spec.side)
        x_NE = x_NE + self._table_PE.index_select(0, planned(place_N, x_NE.device))
        spans = TokenSpans(starts=starts_of(lengths))
        for index, layer in enumerate(self._layers):
            x_NE = layer.forward(x_NE, spans)
            if index == spec.narrowed and self._narrowing is not None:
                x_NE = self._narrowing.forward(x_NE)
                spans = TokenSpans(starts=starts_of([length // WINDOW for length in lengths]))
        x_NE = self._behind.norm(x_NE)
        for merger in self._mergers:
            x_NE = merger.forward(x_NE)
        return x_NE


class _Narrowing:
    """x_NE -> y_ME: a row for each window."""

    def __init__(self, scope: Scope, layer: VisionLayerSpec) -> None:
        width, inner = layer.width, WINDOW * layer.inner
        self._norm = LAYER.build(scope / "layer_norm1", width, eps=layer.eps)
        self._attention = VisionAttention(scope / "self_attn", layer)
        self._merger = _Merger(scope, width, inner, width, "gelu_tanh", layer.eps)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        windows = TokenSpans(starts=range(0, x_NE.shape[0] + 1, WINDOW))
        x_NE = x_NE + self._attention.forward(self._norm.norm(x_NE), windows)
        return self._merger.forward(x_NE) + x_NE.unflatten(0, (-1, WINDOW)).mean(1)


class _Merger:
    """x_NE -> y_MF: windows side by side, a norm, two layers."""

    def __init__(
        self, scope: Scope, width: int, inner: int, outputs: int, activation: str, eps: float
    ) -> None:
        self._window = WINDOW * width
        self._norm = LAYER.build(scope / "pre_norm", self._window, eps=eps)
        self._up = WholeLinear(scope / "linear_1", self._window, inner, bias=True)
        self._activation = ElementwiseActivation(scope, activation)
        self._down = WholeLinear(scope / "linear_2", inner, outputs, bias=True)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_MI = self._norm.norm(x_NE.view(-1, self._window))
        return self._down.project(self._activation.apply(self._up.project(x_MI)))


def _nested(merge: int) -> list[int]:
    """The places of a window of merge x merge in nested windows of 2 x 2."""
    places = np.arange(merge**2).reshape((2,) * (2 * merge.bit_length() - 2))
    half = places.ndim // 2
    axes = [axis for bit in range(half) for axis in (bit, half + bit)]
    return places.transpose(axes).ravel().tolist()
