"""FastConformer (Rekesh et al. 2023): three convolutions over time and bands, of which the later
are depthwise, make one position of eight frames; then layers of half an MLP, attention with places
relative to the query (Dai et al. 2019, appendix B), a gated depthwise convolution with a batch
norm, the other half of the MLP, a norm (Gulati et al. 2020). transformers 5.23,
modeling_parakeet.py.

Inputs are read one after the other. N frames of M bands, S positions, H heads, D of a head, E
width; C queries whose scores are made at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.audio.conformer_branches import (
    EPS,
    Activation,
    BranchSpec,
    PlainHalf,
    SilentConvolution,
)
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.base.wire.media import Strides, length_after

STRIDE = (3, 2, 1)
LOOKING_BACK = (2, 2, 1)
"""As long: three frames, two of which may lie before the first and one behind the last."""
QUERIES = 512
"""Scores of so many are made at a time: of ten minutes all would be gigabytes."""


@dataclass(frozen=True, kw_only=True)
class FastConformerSpec:
    """channels: of the convolutions before the layers, halvings: how many there are. taps: of the
    depthwise ones within. scale: of what goes into the first layer. bias: of linear layers,
    convolution_bias: of the gated convolutions. chunk: a position sees its own so many and those of
    `before` chunks before them, and convolutions look back alone; 0: it sees all (Noroozi et al.
    2024)."""

    bands: int
    channels: int
    halvings: int
    width: int
    inner: int
    layers: int
    heads: int
    taps: int
    scale: float = 1.0
    bias: bool = True
    convolution_bias: bool = True
    activation: Activation = F.silu
    chunk: int = 0
    before: int = 0

    @property
    def branches(self) -> BranchSpec:
        """Of every layer."""
        return BranchSpec(
            width=self.width,
            inner=self.inner,
            taps=self.taps,
            bias=self.bias,
            convolution_bias=self.convolution_bias,
            activation=self.activation,
            looks_back=bool(self.chunk),
        )

    @property
    def strides(self) -> Strides:
        """Along time."""
        return (LOOKING_BACK if self.chunk else STRIDE,) * self.halvings

    @property
    def head_dim(self) -> int:
        """D"""
        return self.width // self.heads

    def build(self, scope: Scope) -> FastConformer:
        """See ConformerSpec."""
        return FastConformer(scope, self)


class Conformer(Protocol):
    """What a tower asks of one. width: of a position."""

    @property
    def width(self) -> int:
        """See the class."""
        ...

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """frames_NM -> x_SE of one input; `ghosts`: see FastConformer."""
        ...


class ConformerSpec(Protocol):
    """One as data of its tower. bands: of a frame; width: of a position; strides: along time."""

    @property
    def bands(self) -> int:
        """See the class."""
        ...

    @property
    def width(self) -> int:
        """See the class."""
        ...

    @property
    def strides(self) -> Strides:
        """See the class."""
        ...

    def build(self, scope: Scope) -> Conformer:
        """`scope` is the tower's."""
        ...


class FastConformer:
    """frames_NM -> x_SE of one input. With `ghosts` its last so many frames are silence that no
    other position sees, as where a reference masks them and yet counts their position."""

    def __init__(self, scope: Scope, spec: FastConformerSpec) -> None:
        self.width = spec.width
        self._spec = spec
        self._reader = PositionReader(scope / "subsampling", spec)
        self._layers = [
            FastConformerLayer(scope / "layers" / str(index), spec) for index in range(spec.layers)
        ]

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See the class."""
        x_SE, real = self._reader.read(frames_NM, ghosts)
        x_SE = x_SE * self._spec.scale
        place_PE = planned(relative_places(real, self._spec.width), x_SE.device).to(x_SE.dtype)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, place_PE, real)
        return x_SE


class PositionReader:
    """frames_NM -> x_SE, and how many of them are no ghosts."""

    def __init__(
        self,
        scope: Scope,
        spec: FastConformerSpec,
        *,
        names: tuple[str, str] = ("layers", "linear"),
    ) -> None:
        """`names`: of the convolutions and of the layer behind them."""
        self._spec, channels = spec, spec.channels
        shapes: list[tuple[int, int, int, int]] = [(channels, 1, 3, 3)]
        shapes += [(channels, 1, 3, 3), (channels, channels, 1, 1)] * (spec.halvings - 1)
        # An activation has a number of its own behind the first and behind each pair.
        numbers = [0, *(2 + 3 * (i // 2) + i % 2 for i in range(2 * (spec.halvings - 1)))]
        places = [f"{names[0]}.{number}" for number in numbers]
        if spec.chunk:
            kinds = ("depthwise_conv", "pointwise_conv")
            pairs = [f"layers.{i}.{kind}" for i in range(spec.halvings - 1) for kind in kinds]
            places = ["conv_in", *pairs]
        self._params = [
            (
                scope.param(f"{place}.weight", shape),
                scope.param(f"{place}.bias", (channels,)),
            )
            for place, shape in zip(places, shapes, strict=True)
        ]
        inputs = channels * length_after(spec.bands, spec.strides)
        self._linear = WholeLinear(scope / names[1], inputs, spec.width, bias=True)
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._params]

    def read(self, frames_NM: torch.Tensor, ghosts: int) -> tuple[torch.Tensor, int]:
        """See the class."""
        x_ACNM, real = frames_NM[None, None], frames_NM.shape[0] - ghosts
        for index, (weight, bias) in enumerate(self._weights):
            if weight.shape[-1] == 1:
                x_ACNM = F.conv2d(x_ACNM, weight, bias)
            else:
                groups, padding = weight.shape[0] if index else 1, 1
                if self._spec.chunk:
                    x_ACNM, padding = F.pad(x_ACNM, (2, 1, 2, 1)), 0
                x_ACNM = F.conv2d(x_ACNM, weight, bias, stride=2, padding=padding, groups=groups)
                real = length_after(real, self._spec.strides[:1])
            if ghosts:
                x_ACNM[:, :, real:] = 0.0
            if index == 0 or weight.shape[-1] == 1:
                x_ACNM = F.relu(x_ACNM)
        return self._linear.project(x_ACNM[0].transpose(0, 1).flatten(1)), real


def relative_places(size: int, width: int) -> torch.Tensor:
    """[2 * size - 1, width]: sines and cosines side by side of distances size - 1 .. 1 - size."""
    scales = 1.0 / 10_000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(size - 1, -size, -1)[:, None].float() * scales
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class FastConformerLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: FastConformerSpec) -> None:
        self._mlps = [PlainHalf(scope / f"feed_forward{i}", spec.branches) for i in (1, 2)]
        attention = RelativeAttentionSpec(
            width=spec.width,
            heads=spec.heads,
            bias=spec.bias,
            chunk=spec.chunk,
            before=spec.before,
        )
        self._attention = RelativeAttention(scope / "self_attn", attention)
        self._convolution = SilentConvolution(scope / "conv", spec.branches)
        names = ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        self._norms = [LAYER.build(scope / f"norm_{one}", spec.width, eps=EPS) for one in names]

    def forward(self, x_SE: torch.Tensor, place_PE: torch.Tensor, real: int) -> torch.Tensor:
        """`real`: positions that are no ghosts."""
        first, attention, convolution, second, last = self._norms
        x_SE = x_SE + 0.5 * self._mlps[0].forward(first.norm(x_SE))
        x_SE = x_SE + self._attention.forward(attention.norm(x_SE), place_PE, real)
        x_SE = x_SE + self._convolution.forward(convolution.norm(x_SE), real)
        x_SE = x_SE + 0.5 * self._mlps[1].forward(second.norm(x_SE))
        return last.norm(x_SE)


@dataclass(frozen=True, kw_only=True)
class RelativeNames:
    """Of the tensors of an attention with places relative to the query."""

    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    out: str = "o_proj"
    places: str = "relative_k_proj"
    biases: tuple[str, str] = ("bias_u", "bias_v")


@dataclass(frozen=True, kw_only=True)
class RelativeAttentionSpec:
    """bias: of its linear layers but that of places. chunk, before: see FastConformerSpec."""

    width: int
    heads: int
    bias: bool
    chunk: int = 0
    before: int = 0
    names: RelativeNames = RelativeNames()

    @property
    def head_dim(self) -> int:
        """D"""
        return self.width // self.heads


class RelativeAttention:
    """x_SE -> y_SE: (q + u) k plus (q + v) p of the distance; a ghost sees the mean of all."""

    def __init__(self, scope: Scope, spec: RelativeAttentionSpec) -> None:
        self._spec, width, names = spec, spec.width, spec.names
        self._query, self._key, self._value, self._out = (
            WholeLinear(scope / one, width, width, bias=spec.bias)
            for one in (names.query, names.key, names.value, names.out)
        )
        self._places = WholeLinear(scope / names.places, width, width)
        shape = (spec.heads, spec.head_dim)
        self._biases = [scope.param(name, shape) for name in names.biases]
        self._bias_HD: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._bias_HD = [one.take() for one in self._biases]

    def forward(self, x_SE: torch.Tensor, place_PE: torch.Tensor, real: int) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        shape = (spec.heads, spec.head_dim)
        q_SHD = self._query.project(x_SE[:real]).unflatten(1, shape)
        k_HSD, v_HSD, p_HPD = (
            one.unflatten(1, shape).transpose(0, 1)
            for one in (
                self._key.project(x_SE[:real]),
                self._value.project(x_SE),
                self._places.project(place_PE),
            )
        )
        of_content_HSD, of_place_HSD = ((q_SHD + one).transpose(0, 1) for one in self._bias_HD)
        y_HSD = torch.cat(
            [
                self._attended(
                    of_content_HSD[:, at : at + QUERIES],
                    of_place_HSD[:, at : at + QUERIES],
                    at,
                    (k_HSD, v_HSD[:, :real], p_HPD),
                )
                for at in range(0, real, QUERIES)
            ]
            + [v_HSD.mean(1, keepdim=True).expand(-1, x_SE.shape[0] - real, -1)],
            dim=1,
        )
        return self._out.project(y_HSD.transpose(0, 1).flatten(1))

    def _attended(
        self,
        of_content_HCD: torch.Tensor,
        of_place_HCD: torch.Tensor,
        at: int,
        seen: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Queries `at`, at + 1 .. over all keys: query i and key j are S - 1 - (i - j) rows behind
        the farthest place."""
        k_HSD, v_HSD, p_HPD = seen
        size, count = k_HSD.shape[1], of_content_HCD.shape[1]
        near_HPD = p_HPD[:, size - at - count : 2 * size - 1 - at]
        # Row i begins count - 1 - i places in, so that a stride of one less shifts it there.
        score_HCP = (of_place_HCD @ near_HPD.transpose(1, 2)).contiguous()
        heads, _, places = score_HCP.shape
        bias_HCS = score_HCP.as_strided(
            (heads, count, size), (count * places, places - 1, 1), count - 1
        )
        scale = self._spec.head_dim**-0.5
        if self._spec.chunk:
            bias_HCS = bias_HCS.masked_fill(self._unseen(at, count, size, k_HSD), float("-inf"))
        return F.scaled_dot_product_attention(
            of_content_HCD[None],
            k_HSD[None],
            v_HSD[None],
            attn_mask=(bias_HCS * scale)[None],
            scale=scale,
        )[0]

    def _unseen(self, at: int, count: int, size: int, like: torch.Tensor) -> torch.Tensor:
        """bool [C, S]: keys of chunks behind the query's, and of those too far before it."""
        spec = self._spec
        key_S = torch.arange(size, device=like.device) // spec.chunk
        apart_CS = key_S[at : at + count, None] - key_S
        return (apart_CS < 0) | (apart_CS > spec.before)
