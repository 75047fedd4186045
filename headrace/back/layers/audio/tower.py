"""Towers that hear: a spectrogram through strided convolutions, Whisper's layers within windows of
time, a norm and what leads to the decoder (Radford et al. 2022; Chu et al. 2024, Qwen2-Audio).

Every rank computes the whole tower. B pieces of at most N frames of M mel bands, S positions behind
the convolutions, E width of the tower, T tokens, F width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import held, planned
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.layer import (
    TokenSpans,
    VisionLayer,
    VisionLayerNames,
    VisionLayerSpec,
)
from headrace.back.layers.vision.plain_tower import Projector, ProjectorSpec
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.shard import Part
from headrace.base.wire.media import MediaForm, SoundSteps, length_after

NAMES = VisionLayerNames(
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    attention="self_attn",
    merged=None,
    out="out_proj",
    mlp_module="",
)
FRAME_WIDTH = 3
"""Frames that a convolution sees."""


class FrameReader(Protocol):
    """Pieces of a spectrogram to positions."""

    def read(self, frames_BNM: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """x_BSE of pieces filled up with zeros behind their `lengths`; what stands behind a piece's
        own positions has no meaning."""
        ...


class FrameReaderSpec(Protocol):
    """A reader as data of its tower."""

    def build(self, scope: Scope, bands: int, width: int) -> FrameReader:
        """`scope` is the tower's."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinePair:
    """Two convolutions along time, the second of which halves it, and a place for each position:
    `table` rows of the checkpoint, or sines (0: as many as there are). `placed`: else there is
    none."""

    table: int = 0
    placed: bool = True

    def build(self, scope: Scope, bands: int, width: int) -> FrameReader:
        """See FrameReaderSpec."""
        return LinePairReader(scope, self, bands, width)


class LinePairReader:
    """`FrameReader` by LinePair: `conv1`, `conv2` [E, inputs, 3] and `embed_positions`."""

    def __init__(self, scope: Scope, spec: LinePair, bands: int, width: int) -> None:
        self._scope, self._width, self._placed = scope, width, spec.placed
        self._convolutions = [
            (
                scope.param(f"{name}.weight", (width, inputs, FRAME_WIDTH)),
                scope.param(f"{name}.bias", (width,)),
            )
            for name, inputs in (("conv1", bands), ("conv2", width))
        ]
        self._table = (
            scope.param("embed_positions.weight", (spec.table, width)) if spec.table else None
        )
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._positions_PE = torch.empty(0, width)
        scope.on_finish(self._finish)

    def read(self, frames_BNM: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See FrameReader."""
        (first, first_bias), (second, second_bias) = self._weights
        x_BEN = F.gelu(F.conv1d(frames_BNM.transpose(1, 2), first, first_bias, padding=1))
        if min(lengths) < x_BEN.shape[2]:  # behind a piece there is nothing, not its bias
            length_B = planned(np.asarray(lengths, np.int64), x_BEN.device)
            inside_BN = torch.arange(x_BEN.shape[2], device=x_BEN.device) < length_B[:, None]
            x_BEN = x_BEN * inside_BN[:, None]
        x_BES = F.gelu(F.conv1d(x_BEN, second, second_bias, stride=2, padding=1))
        x_BSE = x_BES.transpose(1, 2)
        return x_BSE + self._places(x_BSE.shape[1]) if self._placed else x_BSE

    def _places(self, count: int) -> torch.Tensor:
        if self._table is None and count > self._positions_PE.shape[0]:
            self._positions_PE = sines(count, self._width, self._scope)
        # What is filled up may be longer than the table; no piece is.
        table_PE = held(self._positions_PE)
        return F.pad(table_PE[:count], (0, 0, 0, max(0, count - len(table_PE))))

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]
        if self._table is not None:
            self._positions_PE = self._table.take()


@dataclass(frozen=True, kw_only=True)
class PlanarStack:
    """Three convolutions over time and bands, each of which halves both, then a linear layer over
    what is left of the bands, and sines (Qwen3-Omni)."""

    channels: int

    def build(self, scope: Scope, bands: int, width: int) -> FrameReader:
        """See FrameReaderSpec."""
        return PlanarStackReader(scope, self, bands, width)


class PlanarStackReader:
    """`FrameReader` by PlanarStack: `conv2d1` to `conv2d3` and `conv_out`."""

    def __init__(self, scope: Scope, spec: PlanarStack, bands: int, width: int) -> None:
        self._scope, self._width = scope, width
        sides = (FRAME_WIDTH, FRAME_WIDTH)
        self._convolutions = [
            (
                scope.param(f"conv2d{i}.weight", (spec.channels, inputs, *sides)),
                scope.param(f"conv2d{i}.bias", (spec.channels,)),
            )
            for i, inputs in enumerate((1, spec.channels, spec.channels), start=1)
        ]
        left = length_after(bands, ((FRAME_WIDTH, 2, 1),) * 3)
        self._out = ColumnLinear(
            scope, spec.channels * left, (Part("conv_out", width, width),), bias=False
        )
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sines_SE = torch.empty(0, width)
        scope.on_finish(self._finish)

    def read(self, frames_BNM: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """See FrameReader."""
        x = frames_BNM.transpose(1, 2)[:, None]
        for weight, bias in self._weights:
            x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
        x_BSI = x.permute(0, 3, 1, 2).flatten(2)
        x_BSE = self._out.project(x_BSI.flatten(0, 1)).unflatten(0, x_BSI.shape[:2])
        if x_BSE.shape[1] > self._sines_SE.shape[0]:
            self._sines_SE = sines(x_BSE.shape[1], self._width, self._scope)
        return x_BSE + held(self._sines_SE)[: x_BSE.shape[1]]

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]


def sines(count: int, width: int, scope: Scope) -> torch.Tensor:
    """[count, width]: sines, then cosines, of each place (Vaswani et al. 2017, section 3.5)."""
    step = np.log(10_000) / (width // 2 - 1)
    scales = torch.exp(-step * torch.arange(width // 2).float())
    angles = torch.arange(count)[:, None] * scales
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(scope.device, scope.dtype)


@dataclass(frozen=True, kw_only=True)
class OneBiasedLayer:
    """A linear layer with a bias, of this name below `module`."""

    width: int
    outputs: int
    name: str
    module: str = ""
    merge: int = 1

    def build(self, scope: Scope) -> Projector:
        """See ProjectorSpec."""
        return OneBiasedProjector(scope / self.module if self.module else scope, self)


class OneBiasedProjector:
    """x_NE -> y_NF by OneBiasedLayer."""

    def __init__(self, scope: Scope, spec: OneBiasedLayer) -> None:
        part = Part(spec.name, spec.outputs, spec.outputs)
        self._linear = ColumnLinear(scope, spec.width, (part,), bias=True)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        return self._linear.project(x_NE)


@dataclass(frozen=True, kw_only=True)
class AudioTowerSpec:
    """steps: how frames become tokens; their `chunk`s are read apart from each other. window:
    positions that attend to each other, 0: all of an input. pools: two positions are averaged
    before the norm. norm: its name. max_frames: of an input. fills: an input shorter than a chunk
    is filled up to one too. silence: an input is filled up to so many frames by its last one, and
    what they became is left out in the end; 0: it is not. theta: of places that turn, where layers
    rotate. beside: positions that the projector takes side by side. block: positions that see each
    other and all before them, 0: all see all. means: so many of the projector's rows are averaged;
    breaks: see MediaForm."""

    bands: int
    steps: SoundSteps
    reader: FrameReaderSpec
    layer: VisionLayerSpec
    layers: int
    projector: ProjectorSpec
    norm: str
    window: int = 0
    pools: bool = False
    max_frames: int = 60_000
    fills: bool = True
    silence: int = 0
    theta: float = 10_000.0
    beside: int = 1
    block: int = 0
    means: int = 1
    breaks: int = 0


class AudioTower:
    """`MediaEncoder` by an AudioTowerSpec. `whole` is the scope of the checkpoint, `scope` the
    tower's."""

    rope = None
    layers = 0

    def __init__(self, whole: Scope, scope: Scope, spec: AudioTowerSpec) -> None:
        whole, scope = (replace(one, mesh=Mesh(), online=None) for one in (whole, scope))
        self._spec = spec
        width = spec.layer.width
        self._reader = spec.reader.build(scope, spec.bands, width)
        self._layers = [
            VisionLayer(scope / "layers" / str(index), spec.layer) for index in range(spec.layers)
        ]
        self._norm = LAYER.build(scope / spec.norm, width, eps=spec.layer.eps)
        self._projector = spec.projector.build(whole)
        self.width = spec.projector.outputs
        self.dtype = scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * spec.bands,
                max_rows=spec.max_frames,
                max_t=1,
                sound=spec.steps,
                breaks=spec.breaks,
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        spec, steps = self._spec, self._spec.steps
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NM.split([t * h * w for t, h, w in grids])
        tokens = [steps.tokens(one.shape[0]) for one in inputs]
        if spec.silence:
            inputs = tuple(with_silence(one, spec.silence) for one in inputs)
        if spec.fills or min(one.shape[0] for one in inputs) >= steps.chunk:
            x_SE = self._read(inputs)
        else:  # so that none depends on the others
            x_SE = torch.cat([self._read([one]) for one in inputs])
        sizes = [self._positions(one.shape[0]) for one in inputs]
        spans = TokenSpans(starts=_windows(sizes, spec.window), block=spec.block)
        if spec.layer.rotary:
            spans = replace(spans, **_rotation(sizes, spec, x_SE.device))
        for layer in self._layers:
            x_SE = layer.forward(x_SE, spans)
        if spec.pools:
            pairs = [one[: len(one) // 2 * 2] for one in x_SE.split(sizes)]
            x_SE = torch.cat(pairs).unflatten(0, (-1, 2)).mean(1)
        x_SE = self._norm.norm(x_SE)
        if spec.silence:
            kept = zip(x_SE.split(sizes), tokens, strict=True)
            x_SE = torch.cat([one[: count * spec.beside] for one, count in kept])
        y_SF = self._projector.merge(x_SE.reshape(-1, spec.beside * x_SE.shape[1]))
        if spec.means == 1:
            return y_SF
        whole = [one[: len(one) // spec.means * spec.means] for one in y_SF.split(sizes)]
        return torch.cat(whole).unflatten(0, (-1, spec.means)).mean(1)

    def _read(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """x_SE of spectrograms, whose pieces are filled up to the same length."""
        steps = self._spec.steps
        pieces = [piece for one in inputs for piece in one.split(steps.chunk or one.shape[0])]
        lengths = [piece.shape[0] for piece in pieces]
        frames_BNM = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        if steps.chunk and self._spec.fills:
            frames_BNM = F.pad(frames_BNM, (0, 0, 0, steps.chunk - frames_BNM.shape[1]))
        x_BSE = self._reader.read(frames_BNM, lengths)
        return torch.cat(
            [x_SE[: self._positions(n)] for x_SE, n in zip(x_BSE, lengths, strict=True)]
        )

    def _positions(self, frames: int) -> int:
        """Of an input, in all its pieces."""
        steps = self._spec.steps
        if self._spec.silence:  # which has positions too
            return steps.positions(frames + steps.margin)
        if not steps.chunk:
            return steps.positions(frames)
        whole, rest = divmod(frames, steps.chunk)
        return whole * steps.positions(steps.chunk) + (steps.positions(rest) if rest else 0)


def with_silence(frames_NM: torch.Tensor, length: int) -> torch.Tensor:
    """Filled up to so many frames by the last, which is silence."""
    missing = max(0, length - frames_NM.shape[0])
    return torch.cat((frames_NM, frames_NM[-1:].expand(missing, -1)))[:length]


def _rotation(
    sizes: Sequence[int], spec: AudioTowerSpec, device: torch.device
) -> dict[str, torch.Tensor]:
    """What TokenSpans has of places that are counted from each input's first position."""
    dims = spec.layer.rotary_dims or spec.layer.head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    angles = torch.arange(max(sizes))[:, None] * (1.0 / spec.theta**exponents)
    table_PR = planned(torch.cat((angles.cos(), angles.sin()), dim=1), device)
    place_N = planned(torch.cat([torch.arange(size) for size in sizes]), device)
    return {"table_NR": table_PR, "place_N": place_N}


def _windows(sizes: Sequence[int], window: int) -> list[int]:
    """The first position of each window, and the number of all."""
    lengths = []
    for size in sizes:
        whole, rest = divmod(size, window or size)
        lengths += [window or size] * whole + [rest] * (rest > 0)
    return [0, *accumulate(lengths)]
