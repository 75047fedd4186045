"""The audio tower of Gemma 4: two convolutions over a spectrogram, the layers of usm.py, and what
leads to the decoder.

Every rank computes the whole tower. N frames of M mel bands, T positions, E width, F width of the
decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.usm import UsmLayer, UsmLayerSpec, near_positions
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, SoundSteps, length_after

HALVES = ((3, 2, 1),) * 2
"""Both convolutions along time, and along bands."""


@dataclass(frozen=True, kw_only=True)
class UsmTowerSpec:
    """channels: of both convolutions. middle: width behind the last layer. outputs: of the decoder.
    max_frames: of an input."""

    bands: int
    channels: tuple[int, int]
    layer: UsmLayerSpec
    layers: int
    middle: int
    outputs: int
    max_frames: int = 60_000


class UsmTower:
    """`MediaEncoder` by a UsmTowerSpec; `scope` is the tower's, `leading` that of what leads to the
    decoder."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, leading: Scope, spec: UsmTowerSpec) -> None:
        scope, leading = (
            replace(one, mesh=Mesh(), online=None, adapters=None) for one in (scope, leading)
        )
        self._spec, width = spec, spec.layer.width
        inside = scope / "subsample_conv_projection"
        self._convolutions = [
            (
                inside.param(f"layer{i}.conv.weight", (outputs, inputs, 3, 3)),
                inside.param(f"layer{i}.norm.weight", (outputs,)),
            )
            for i, (inputs, outputs) in enumerate(((1, spec.channels[0]), spec.channels))
        ]
        left = length_after(spec.bands, HALVES)
        self._into = WholeLinear(inside / "input_proj_linear", left * spec.channels[1], width)
        self._layers = [
            UsmLayer(scope / "layers" / str(index), spec.layer) for index in range(spec.layers)
        ]
        self._out = WholeLinear(scope / "output_proj", width, spec.middle, bias=True)
        self._norm = RMS_NO_WEIGHT.build(leading, spec.middle, eps=spec.layer.eps)
        self._lead = WholeLinear(leading / "embedding_projection", spec.middle, spec.outputs)
        self.width, self.dtype = spec.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * spec.bands,
                max_rows=spec.max_frames,
                max_t=1,
                sound=SoundSteps(strides=HALVES),
            ),
        )
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(kernel.take(), norm.take()) for kernel, norm in self._convolutions]

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NM.split([t * h * w for t, h, w in grids])
        parts = [self._subsampled(one) for one in inputs]
        near = near_positions([len(one) for one in parts], self._spec.layer, rows_NB.device)
        x_TE = self._into.project(torch.cat(parts))
        for layer in self._layers:
            x_TE = layer.forward(x_TE, near)
        return self._lead.project(self._norm.norm(self._out.project(x_TE)))

    def _subsampled(self, frames_NM: torch.Tensor) -> torch.Tensor:
        """[T, what is left of the bands times channels] of one input."""
        x_CNM = frames_NM[None]
        for kernel, norm_C in self._weights:
            x_NMC = F.conv2d(x_CNM, kernel, stride=2, padding=1).permute(1, 2, 0)
            x_NMC = F.layer_norm(x_NMC, norm_C.shape, norm_C, eps=self._spec.layer.eps)
            x_CNM = x_NMC.relu().permute(2, 0, 1)
        return x_CNM.permute(1, 2, 0).flatten(1)
