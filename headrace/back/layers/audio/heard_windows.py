"""Whisper's encoder over windows of half a minute, each filled up with silence, of which the
positions of whole tokens are kept.

N frames of M bands, S positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.layers.audio.tower import LinePair, with_silence
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import TokenSpans, VisionLayer, VisionLayerSpec


@dataclass(frozen=True, kw_only=True)
class HeardWindowsSpec:
    """positions: of a window, two frames each; beside: positions of a token; eps: of the norm
    behind the layers, layer_norm."""

    bands: int
    layer: VisionLayerSpec
    layers: int
    positions: int
    beside: int
    eps: float

    @property
    def outputs(self) -> int:
        """Of a token: its positions side by side."""
        return self.beside * self.layer.width

    @property
    def margin(self) -> int:
        """Frames behind those of tokens, of which the last is silence."""
        return 2 * self.beside

    @property
    def rows(self) -> int:
        """Of a whole window."""
        return 2 * self.positions + self.margin


class HeardWindows:
    """Windows [N, M], with `margin` behind whole tokens -> x_TX, T tokens one behind the other.
    `scope` is the encoder's."""

    def __init__(self, scope: Scope, spec: HeardWindowsSpec) -> None:
        self._spec = spec
        self._reader = LinePair(table=spec.positions).build(scope, spec.bands, spec.layer.width)
        self._layers = [
            VisionLayer(scope / "layers" / str(index), spec.layer) for index in range(spec.layers)
        ]
        self._norm = LAYER.build(scope / "layer_norm", spec.layer.width, eps=spec.eps)

    def hear(self, windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """See the class."""
        spec, count = self._spec, self._spec.positions
        frames_BNM = torch.stack([with_silence(one, 2 * count) for one in windows])
        x_SD = self._reader.read(frames_BNM, [2 * count] * len(windows)).flatten(0, 1)
        spans = TokenSpans(starts=range(0, x_SD.shape[0] + 1, count))
        for layer in self._layers:
            x_SD = layer.forward(x_SD, spans)
        x_SD = self._norm.norm(x_SD)
        sizes = [(one.shape[0] - spec.margin) // 2 for one in windows]
        kept = [one[:size] for one, size in zip(x_SD.split(count), sizes, strict=True)]
        return torch.cat(kept).unflatten(0, (-1, spec.beside)).flatten(1)
