"""wav2vec 2.0 (Baevski et al. 2020): convolutions over the samples themselves, a projection, places
by convolutions, and layers of attention and MLP with norms behind each branch or before it.
WavLM (Chen et al. 2022) adds to the scores a bias by distance, which each query gates. transformers
5.23, modeling_wav2vec2.py, modeling_wavlm.py.

Inputs are read one after the other. N samples, S positions, H heads, E width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.audio.wave_conformer import WaveConformer, WaveConformerSpec
from headrace.back.layers.audio.wave_places import Activation, WavePlacesSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, SoundSteps, Strides

EPS = 1e-5
"""Of the norms between convolutions; no config states it."""
MOST_SAMPLES = 60 * 16_000
"""Of one input."""


@dataclass(frozen=True, kw_only=True)
class DistanceBias:
    """Of scores, by the distance of key and query: `buckets` of them, told apart up to `reach`."""

    buckets: int
    reach: int


@dataclass(frozen=True, kw_only=True)
class WaveTowerSpec:
    """channels, strides: of the convolutions over samples. normed: each of them has a norm over its
    channels; else the first has one over time. projection_norm: before the projection, projected:
    whether there is one; names: of both. before: norms stand before each branch. Positions that
    their places squeeze into one are unfolded behind the layers. conformer: of layers of that kind,
    which have places of their own."""

    channels: tuple[int, ...]
    strides: Strides
    bias: bool
    normed: bool
    convolution_activation: Activation
    projection_norm: bool
    width: int
    inner: int
    heads: int
    layers: int
    eps: float
    activation: Activation
    places: WavePlacesSpec | None
    before: bool
    projected: bool = True
    names: tuple[str, str] = ("feature_projection.layer_norm", "feature_projection.projection")
    distances: DistanceBias | None = None
    conformer: WaveConformerSpec | None = None


class WaveTower:
    """`MediaEncoder`, of which every position is a token."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: WaveTowerSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._spec, width = spec, spec.width
        self._reader = SampleReader(scope / "feature_extractor.conv_layers", spec)
        norm, projection = spec.names
        last = spec.channels[-1]
        self._before = self._projection = self._unfold = None
        if spec.projection_norm:
            self._before = LAYER.build(scope / norm, last, eps=spec.eps)
        if spec.projected:
            self._projection = WholeLinear(scope / projection, last, width, bias=True)
        self._places = self._conformer = None
        if spec.conformer is not None:
            self._conformer = WaveConformer(scope, spec.conformer)
        if spec.places is not None:
            self._places = spec.places.build(scope / "encoder.pos_conv_embed")
        if spec.places is not None and spec.places.squeeze > 1:
            inner = width * spec.places.squeeze
            self._unfold = WholeLinear(
                scope / "encoder.upsample.projection", width, inner, bias=True
            )
        self._norm = LAYER.build(scope / "encoder.layer_norm", width, eps=spec.eps)
        self._layers = [
            WaveLayer(scope / "encoder.layers" / str(index), spec)
            for index in range(0 if spec.conformer else spec.layers)
        ]
        self._distances = None
        if spec.distances is not None:
            name = "encoder.layers.0.attention.rel_attn_embed.weight"
            self._distances = scope.param(name, (spec.distances.buckets, spec.heads))
        self._bias_DH = torch.empty(0)
        scope.on_finish(self._finish)
        self.width, self.dtype = width, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4,
                max_rows=MOST_SAMPLES,
                max_t=1,
                sound=SoundSteps(strides=spec.strides),
            ),
        )

    def _finish(self) -> None:
        if self._distances is not None:
            self._bias_DH = self._distances.take()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        samples_N = rows_NB.view(torch.float32)[:, 0].to(self.dtype)
        inputs = samples_N.split([t * h * w for t, h, w in grids])
        return torch.cat([self._encoded(one) for one in inputs])

    def _encoded(self, samples_N: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        x_SC = self._reader.read(samples_N)
        if self._before is not None:
            x_SC = self._before.norm(x_SC)
        x_SE = x_SC if self._projection is None else self._projection.project(x_SC)
        if self._conformer is not None:
            return self._norm.norm(self._conformer.forward(x_SE))
        whole = x_SE.shape[0]
        x_SE = self._placed(x_SE)
        if not spec.before:
            x_SE = self._norm.norm(x_SE)
        bias_HSS = None
        if spec.distances is not None:
            bucket_SS = planned(distance_buckets(x_SE.shape[0], spec.distances), x_SE.device)
            bias_HSS = self._bias_DH[bucket_SS].permute(2, 0, 1)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, bias_HSS)
        x_SE = self._norm.norm(x_SE) if spec.before else x_SE
        if self._unfold is None:
            return x_SE
        y_SX = spec.convolution_activation(self._unfold.project(x_SE))
        y_SE = y_SX.view(-1, spec.width)
        return F.pad(y_SE, (0, 0, 0, whole - y_SE.shape[0]))

    def _placed(self, x_SE: torch.Tensor) -> torch.Tensor:
        assert self._places is not None and self._spec.places is not None, "places by convolutions"
        y_SE, squeeze = self._places.of(x_SE), self._spec.places.squeeze
        if squeeze > 1:
            x_SE = F.avg_pool1d(x_SE.T[None], squeeze, squeeze)[0].T
            x_SE, y_SE = x_SE[: y_SE.shape[0]], y_SE[: x_SE.shape[0]]
        return x_SE + y_SE


class SampleReader:
    """samples_N -> x_SC."""

    def __init__(self, scope: Scope, spec: WaveTowerSpec) -> None:
        self._spec = spec
        self._params = []
        inputs = 1
        for index, (channels, stride) in enumerate(zip(spec.channels, spec.strides, strict=True)):
            at = scope / str(index)
            params = {"conv.weight": at.param("conv.weight", (channels, inputs, stride[0]))}
            if spec.bias:
                params["conv.bias"] = at.param("conv.bias", (channels,))
            if spec.normed or index == 0:
                for name in ("layer_norm.weight", "layer_norm.bias"):
                    params[name] = at.param(name, (channels,))
            self._params.append(params)
            inputs = channels
        self._weights: list[dict[str, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [
            {name: param.take() for name, param in params.items()} for params in self._params
        ]

    def read(self, samples_N: torch.Tensor) -> torch.Tensor:
        """See the class."""
        spec, x_ACN = self._spec, samples_N[None, None]
        for at, (_, stride, _) in zip(self._weights, spec.strides, strict=True):
            x_ACN = F.conv1d(x_ACN, at["conv.weight"], at.get("conv.bias"), stride=stride)
            if "layer_norm.weight" in at:
                norm = at["layer_norm.weight"], at["layer_norm.bias"]
                if spec.normed:
                    size = (x_ACN.shape[1],)
                    x_ACN = F.layer_norm(x_ACN.transpose(1, 2), size, *norm, EPS).transpose(1, 2)
                else:
                    x_ACN = F.group_norm(x_ACN, x_ACN.shape[1], *norm, EPS)
            x_ACN = spec.convolution_activation(x_ACN)
        return x_ACN[0].T.contiguous()


class WaveLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: WaveTowerSpec) -> None:
        self._spec = spec
        self._attention = WaveAttention(scope / "attention", spec)
        inside = scope / "feed_forward"
        self._up = WholeLinear(inside / "intermediate_dense", spec.width, spec.inner, bias=True)
        self._down = WholeLinear(inside / "output_dense", spec.inner, spec.width, bias=True)
        self._norms = [
            LAYER.build(scope / name, spec.width, eps=spec.eps)
            for name in ("layer_norm", "final_layer_norm")
        ]

    def forward(self, x_SE: torch.Tensor, bias_HSS: torch.Tensor | None) -> torch.Tensor:
        """See the class; `bias_HSS`: of scores, before gates."""
        first, second = self._norms
        if self._spec.before:
            x_SE = x_SE + self._attention.forward(first.norm(x_SE), bias_HSS)
            return x_SE + self._mlp(second.norm(x_SE))
        x_SE = first.norm(x_SE + self._attention.forward(x_SE, bias_HSS))
        return second.norm(x_SE + self._mlp(x_SE))

    def _mlp(self, x_SE: torch.Tensor) -> torch.Tensor:
        return self._down.project(self._spec.activation(self._up.project(x_SE)))


class WaveAttention:
    """x_SE -> y_SE over all positions of an input."""

    def __init__(self, scope: Scope, spec: WaveTowerSpec) -> None:
        self._spec, width = spec, spec.width
        self._query, self._key, self._value, self._out = (
            WholeLinear(scope / f"{name}_proj", width, width, bias=True)
            for name in ("q", "k", "v", "out")
        )
        self._gate = self._gain = None
        if spec.distances is not None:
            self._gate = WholeLinear(
                scope / "gru_rel_pos_linear", width // spec.heads, 8, bias=True
            )
            self._gain = scope.param("gru_rel_pos_const", (1, spec.heads, 1, 1))
        self._gain_H = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        if self._gain is not None:
            self._gain_H = self._gain.take().flatten()

    def forward(self, x_SE: torch.Tensor, bias_HSS: torch.Tensor | None) -> torch.Tensor:
        """See WaveLayer."""
        shape = (self._spec.heads, -1)
        q_HSD, k_HSD, v_HSD = (
            one.project(x_SE).unflatten(1, shape).transpose(0, 1)
            for one in (self._query, self._key, self._value)
        )
        if bias_HSS is not None:
            bias_HSS = self._gated(x_SE, bias_HSS)
        mask = None if bias_HSS is None else bias_HSS.to(q_HSD.dtype)[None]
        y_HSD = F.scaled_dot_product_attention(q_HSD[None], k_HSD[None], v_HSD[None], mask)[0]
        return self._out.project(y_HSD.transpose(0, 1).flatten(1))

    def _gated(self, x_SE: torch.Tensor, bias_HSS: torch.Tensor) -> torch.Tensor:
        assert self._gate is not None
        heads = self._spec.heads
        x_ND = x_SE.unflatten(1, (heads, -1)).flatten(0, 1)
        gate_SH2 = self._gate.project(x_ND).view(-1, heads, 2, 4).sum(-1).sigmoid()
        a_SH, b_SH = gate_SH2.unbind(-1)
        gate_SH = a_SH * (b_SH * self._gain_H - 1.0) + 2.0
        return gate_SH.T[:, :, None] * bias_HSS


def distance_buckets(size: int, spec: DistanceBias) -> torch.Tensor:
    """[S, S]: near distances have a bucket each, far ones share those of their logarithm; keys
    behind the query the upper half (Raffel et al. 2020, section 2.1)."""
    half = spec.buckets // 2
    exact = half // 2
    place = torch.arange(size)
    distance = place[None] - place[:, None]
    far = distance.abs()
    share = torch.log(far.float() / exact) / math.log(spec.reach / exact)
    by_log = (exact + share * (half - exact)).to(torch.long).clamp(max=half - 1)
    return (distance > 0).long() * half + torch.where(far < exact, far, by_log)
