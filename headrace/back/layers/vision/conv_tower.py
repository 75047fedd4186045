"""A vision tower of gated convolutions over the grid of each image, with layers of attention among
them (Liquid AI 2026, LFM3-VL).

Every rank computes the whole tower. N patches, M tokens, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import coordinates, rows_then_columns
from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import FeedForwardPlace, GatedMLP
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.grids import frame_lengths, starts_of
from headrace.back.layers.vision.layer import TokenSpans, VisionLayer, VisionLayerSpec
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm


@dataclass(frozen=True, kw_only=True)
class ConvTowerSpec:
    """attends: of each layer, whether it attends within the frame, else it convolves by `taps` x
    `taps` patches. theta: of the rotation."""

    patches: PatchSpec
    layer: VisionLayerSpec
    attends: tuple[bool, ...]
    taps: int
    theta: float
    projector: TwoLayers


class ConvTower:
    """`MediaEncoder` by a ConvTowerSpec. `whole` is the scope of tower and projector, `scope` the
    tower's."""

    rope = None
    layers = 0

    def __init__(self, whole: Scope, scope: Scope, spec: ConvTowerSpec) -> None:
        whole, scope = (
            replace(one, mesh=Mesh(), online=None, adapters=None) for one in (whole, scope)
        )
        self._spec = spec
        self._patches = PatchEmbedding(scope, spec.layer.width, spec.patches)
        norm = spec.layer.norm
        self._norm = norm.build(scope / "embedding_norm", spec.layer.width, eps=spec.layer.eps)
        self._layers = [
            VisionLayer(scope / f"layers.{index}", spec.layer)
            if attends
            else ConvLayer(scope / f"layers.{index}", spec)
            for index, attends in enumerate(spec.attends)
        ]
        self._projector = spec.projector.build(whole)
        patches, merge = spec.patches, spec.projector.merge
        image = MediaForm(
            kind="image", row_bytes=patches.row_bytes, patch=patches.patch, merge=merge, max_t=1
        )
        video = MediaForm(
            kind="video",
            row_bytes=patches.row_bytes * patches.frames,
            patch=patches.patch,
            frames=patches.frames,
            merge=merge,
            max_t=1,
            prunes=True,
        )
        self.forms = (image, video)
        self.width = spec.projector.outputs
        self.dtype = scope.dtype

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        spec, merge = self._spec, self._spec.projector.merge
        x_NE = self._norm.norm(self._patches.embed(rows_NB))
        at_2N = np.concatenate([coordinates(grid, merge) for grid in grids], axis=1)
        place_2N = planned(at_2N, x_NE.device)
        angles_NH = rows_then_columns(place_2N, spec.layer.head_dim, spec.theta)
        spans = TokenSpans(
            starts=starts_of(frame_lengths(grids)),
            table_NR=torch.cat((angles_NH.cos(), angles_NH.sin()), dim=1),
            place_N=torch.arange(angles_NH.shape[0], device=x_NE.device),
        )
        for layer in self._layers:
            if isinstance(layer, ConvLayer):
                x_NE = layer.forward(x_NE, grids)
            else:
                x_NE = layer.forward(x_NE, spans)
        return self._projector.merge(x_NE)


class ConvLayer:
    """x_NE -> x_NE: one gate before the convolution, one behind it, then an MLP."""

    def __init__(self, scope: Scope, spec: ConvTowerSpec) -> None:
        layer, inside = spec.layer, scope / "conv"
        width, names = layer.width, layer.names
        self._merge, self._taps = spec.projector.merge, spec.taps
        self._before, self._before_mlp = (
            layer.norm.build(scope / name, width, eps=layer.eps)
            for name in (names.before_attention, names.before_mlp)
        )
        self._in = WholeLinear(inside / "in_proj", width, 3 * width)
        shape = (width, 1, spec.taps, spec.taps)
        self._conv = (inside / "spatial_conv").param("weight", shape)
        self._out = WholeLinear(inside / "out_proj", width, width)
        place = FeedForwardPlace(width=width, inner=layer.inner, activation=layer.activation)
        gate, up, down = names.mlp
        self._mlp = GatedMLP(scope / names.mlp_module, place, names=(gate, up, down))
        self._kernel_E1YX = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See the class."""
        before_NE, behind_NE, in_NE = self._in.project(self._before.norm(x_NE)).chunk(3, dim=1)
        parts = (before_NE * in_NE).split([t * h * w for t, h, w in grids])
        convolved = [self._convolved(*each) for each in zip(parts, grids, strict=True)]
        x_NE = x_NE + self._out.project(behind_NE * torch.cat(convolved))
        return x_NE + self._mlp.forward(self._before_mlp.norm(x_NE))

    def _convolved(self, part_NE: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Of one input, whose rows lie in windows before and behind."""
        (t, h, w), merge = grid, self._merge
        windows = part_NE.view(t, h // merge, w // merge, merge, merge, -1)
        picture_TEHW = windows.permute(0, 5, 1, 3, 2, 4).reshape(t, -1, h, w)
        width, padding = picture_TEHW.shape[1], self._taps // 2
        seen = F.conv2d(picture_TEHW, self._kernel_E1YX, padding=padding, groups=width)
        windows = seen.view(t, width, h // merge, merge, w // merge, merge)
        return windows.permute(0, 2, 4, 3, 5, 1).reshape(t * h * w, width)

    def _finish(self) -> None:
        self._kernel_E1YX = self._conv.take()
