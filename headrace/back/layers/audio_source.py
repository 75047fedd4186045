"""What stands before an encoder of speech: two convolutions over a spectrogram, the second of which
halves its length, and positions (Radford et al. 2022, section 2.2).

B inputs of M mel bands and F frames, S = B * F / 2 encoder positions, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.layers.scope import Scope

WIDTH = 3
"""Frames that a convolution sees."""


class AudioSource:
    """spectrograms [B, M, F] -> x_SE. The checkpoint holds `conv1`, `conv2` [E, inputs, WIDTH] and
    `embed_positions` [F / 2, E] below `scope`. Every rank computes all of it."""

    def __init__(self, scope: Scope, *, bands: int, positions: int, width: int) -> None:
        self._dtype = scope.dtype
        self._convolutions = [
            (
                scope.param(f"{name}.weight", (width, inputs, WIDTH)),
                scope.param(f"{name}.bias", (width,)),
            )
            for name, inputs in (("conv1", bands), ("conv2", width))
        ]
        self._table = scope.param("embed_positions.weight", (positions, width))
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._positions_PE = torch.empty(0)
        scope.on_finish(self._finish)

    def read(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = spectrograms.to(self._dtype)
        for stride, (weight, bias) in enumerate(self._weights, start=1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        return (x.transpose(1, 2) + self._positions_PE).flatten(0, 1)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]
        self._positions_PE = self._table.take()
