"""Tokens of sound: Whisper's first layers with convolutions that look back alone, the mean of
positions side by side, and the entry of a codebook that is nearest to it (Zeng et al. 2024,
GLM-4-Voice; van den Oord et al. 2017).

N frames of M bands, S = N / 2 positions, T tokens, K entries, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import TokenSpans, VisionLayer, VisionLayerSpec

STRIDE = 2
"""Frames of a position."""
WIDTH = 3
"""Frames that a convolution sees."""


@dataclass(frozen=True, kw_only=True)
class SoundTokensSpec:
    """`layers` of the encoder; `pool`: positions of a token; `block`: positions that see each other
    and those before them; `positions`: rows of the table of places; `entries` of the codebook."""

    bands: int
    layer: VisionLayerSpec
    layers: int
    pool: int
    block: int
    positions: int
    entries: int


class SoundTokens:
    """Windows of frames -> ids_T, one behind the other."""

    def __init__(self, scope: Scope, spec: SoundTokensSpec) -> None:
        self._spec, width = spec, spec.layer.width
        self._convolutions = [
            (
                scope.param(f"{name}.weight", (width, inputs, WIDTH)),
                scope.param(f"{name}.bias", (width,)),
            )
            for name, inputs in (("conv1", spec.bands), ("conv2", width))
        ]
        self._places = scope.param("embed_positions.weight", (spec.positions, width))
        self._layers = [
            VisionLayer(scope / "layers" / str(index), spec.layer) for index in range(spec.layers)
        ]
        self._codebook = scope.param("codebook.weight", (spec.entries, width))
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._place_PE = self._entry_KE = self._norm_K = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]
        self._place_PE = self._places.take()
        self._entry_KE = self._codebook.take().float()
        self._norm_K = self._entry_KE.square().sum(1)

    def tell(self, windows: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> torch.Tensor:
        """`windows`: [N, M] each, N whole tokens; `real`: bool [N], which frames lie within the
        sound: others are seen by none."""
        positions = torch.cat([self._read(one) for one in windows])
        starts = [0]
        for one in windows:
            starts.append(starts[-1] + one.shape[0] // STRIDE)
        seen_S = torch.cat([one[::STRIDE] for one in real])
        spans = TokenSpans(starts=starts, block=self._spec.block, seen_N=seen_S)
        for layer in self._layers:
            positions = layer.forward(positions, spans)
        mean_TE = positions.unflatten(0, (-1, self._spec.pool)).mean(1).float()
        return (self._norm_K - 2.0 * (mean_TE @ self._entry_KE.T)).argmin(1)

    def _read(self, frames_NM: torch.Tensor) -> torch.Tensor:
        (first, first_bias), (second, second_bias) = self._weights
        x_AEN = F.gelu(F.conv1d(F.pad(frames_NM.T[None], (WIDTH - 1, 0)), first, first_bias))
        x_AES = F.conv1d(F.pad(x_AEN, (WIDTH - 1, 0)), second, second_bias, stride=STRIDE)
        x_SE = F.gelu(x_AES)[0].T
        return x_SE + self._place_PE[: x_SE.shape[0]]
