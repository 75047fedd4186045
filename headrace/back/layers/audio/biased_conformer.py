"""The conformer of Phi-4 multimodal (Abouelenin et al. 2025): frames of a fixed mean and deviation,
convolutions that make one position of eight, then layers of half a gated MLP, attention with a
learned bias by distance, a gated convolution that looks back, the other half of the MLP, a norm.
Longer inputs are read in pieces, the last of which is filled up with zeros that are seen
(transformers 5.23, modeling_phi4_multimodal.py).

N frames of M bands, S positions, H heads, D of a head, E width, C channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.conformer_branches import EPS, Activation
from headrace.back.layers.audio.fast_conformer import FastConformerSpec, PositionReader
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope

PIECE = 500
"""Positions."""


@dataclass(frozen=True, kw_only=True)
class BiasedConformerSpec:
    """reader: of the convolutions before the layers. distance: of the farthest places that are told
    apart; symmetric: those before are those behind. channels: behind the gate, spread: of the
    depthwise convolution for each position's own, taps: of it, mixed: of the one behind.
    Activations: of the MLP, of the gate and behind the convolution."""

    reader: FastConformerSpec
    inner: int
    distance: int
    symmetric: bool
    channels: int
    spread: int
    mixed: int
    taps: int
    activation: Activation
    gate: Activation
    convolved: Activation

    @property
    def width(self) -> int:
        """Of a position."""
        return self.reader.width


class BiasedConformer:
    """frames_NM -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: BiasedConformerSpec) -> None:
        self._spec, reader = spec, spec.reader
        normal = scope / "encoder_embedding"
        self._params = [
            normal.param(name, (reader.bands,)) for name in ("global_mean", "global_invstd")
        ]
        self._reader = PositionReader(scope / "embed", reader, names=("conv", "out"))
        count = spec.distance if spec.symmetric else 2 * spec.distance
        biases = scope / "relative_attention_bias_layer"
        self._biases = biases.param("bias_values.weight", (count, reader.heads))
        self._layers = [
            BiasedConformerLayer(scope / "encoders" / str(index), spec)
            for index in range(reader.layers)
        ]
        self._normal: list[torch.Tensor] = []
        self._bias_BH = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._normal = [one.take() for one in self._params]
        self._bias_BH = self._biases.take()

    def forward(self, frames_NM: torch.Tensor) -> torch.Tensor:
        """See the class."""
        mean_M, scale_M = self._normal
        x_SE, size = self._reader.read((frames_NM - mean_M) * scale_M, 0)
        if size > PIECE:
            x_SE = F.pad(x_SE, (0, 0, 0, -size % PIECE))
        return torch.cat([self._through(piece) for piece in x_SE.split(PIECE)])[:size]

    def _through(self, x_SE: torch.Tensor) -> torch.Tensor:
        place_S = torch.arange(x_SE.shape[0], device=x_SE.device)
        farthest = self._spec.distance
        apart_SS = (place_S - place_S[:, None]).clamp(-farthest, farthest - 1)
        index_SS = apart_SS.abs() if self._spec.symmetric else apart_SS + farthest
        bias_HSS = self._bias_BH[index_SS].permute(2, 0, 1)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, bias_HSS)
        return x_SE


class BiasedConformerLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: BiasedConformerSpec) -> None:
        names = ("feed_forward_in", "feed_forward_out")
        self._first, self._second = (GatedHalf(scope / name, spec) for name in names)
        self._spec, width, attention = spec, spec.width, scope / "self_attn"
        self._query, self._key, self._value, self._out = (
            WholeLinear(attention / f"{one}_proj", width, width, bias=True) for one in "qkvo"
        )
        self._convolution = BackwardConvolution(scope / "conv", spec)
        self._before, self._norm = (
            LAYER.build(scope / name, width, eps=EPS) for name in ("layer_norm_att", "layer_norm")
        )

    def forward(self, x_SE: torch.Tensor, bias_HSS: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_SE = x_SE + 0.5 * self._first.forward(x_SE)
        x_SE = x_SE + self._attended(self._before.norm(x_SE), bias_HSS)
        x_SE = x_SE + self._convolution.forward(x_SE)
        x_SE = x_SE + 0.5 * self._second.forward(x_SE)
        return self._norm.norm(x_SE)

    def _attended(self, x_SE: torch.Tensor, bias_HSS: torch.Tensor) -> torch.Tensor:
        heads = self._spec.reader.heads
        q, k, v = (
            one.project(x_SE).unflatten(1, (heads, -1)).transpose(0, 1)[None]
            for one in (self._query, self._key, self._value)
        )
        y_HSD = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_HSS[None])[0]
        return self._out.project(y_HSD.transpose(0, 1).flatten(1))


class GatedHalf:
    """x_SE -> y_SE; the second half of what goes up gates the first."""

    def __init__(self, scope: Scope, spec: BiasedConformerSpec) -> None:
        self._activation = spec.activation
        self._norm = LAYER.build(scope / "layer_norm", spec.width, eps=EPS)
        self._up = WholeLinear(scope / "gate_up_proj", spec.width, 2 * spec.inner, bias=True)
        self._down = WholeLinear(scope / "down_proj", spec.inner, spec.width, bias=True)

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        value_SI, gate_SI = self._up.project(self._norm.norm(x_SE)).chunk(2, dim=1)
        return self._down.project(value_SI * self._activation(gate_SI))


class BackwardConvolution:
    """x_SE -> y_SE."""

    def __init__(self, scope: Scope, spec: BiasedConformerSpec) -> None:
        self._spec, width, channels = spec, spec.width, spec.channels
        spread = width * spec.spread
        self._norm = LAYER.build(scope / "layer_norm", width, eps=EPS)
        shapes: dict[str, tuple[int, ...]] = {
            "glu.ext_pw_conv_1d.weight": (2 * channels, width, 1),
            "glu.ext_pw_conv_1d.bias": (2 * channels,),
            "glu.b1": (1, channels, 1),
            "glu.b2": (1, channels, 1),
            "dw_sep_conv_1d.dw_conv.weight": (spread, 1, spec.taps),
            "dw_sep_conv_1d.dw_conv.bias": (spread,),
            "dw_sep_conv_1d.pw_conv.weight": (spec.mixed, spread, 1),
            "dw_sep_conv_1d.pw_conv.bias": (spec.mixed,),
            "ext_pw_conv_1d.weight": (channels, width, 1),
            "ext_pw_conv_1d.bias": (channels,),
        }
        self._params = {name: scope.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        value_SC, gate_SC = self._mixed("glu.ext_pw_conv_1d", self._norm.norm(x_SE)).chunk(2, dim=1)
        at = self._weights
        value_SC = value_SC + at["glu.b1"][0, :, 0]
        y_SC = value_SC * self._spec.gate(gate_SC + at["glu.b2"][0, :, 0])
        kernel, bias = (at[f"dw_sep_conv_1d.dw_conv.{name}"] for name in ("weight", "bias"))
        padded_ACS = F.pad(y_SC.T[None], (self._spec.taps - 1, 0))
        y_SX = F.conv1d(padded_ACS, kernel, bias, groups=y_SC.shape[1])[0].T
        y_SE = self._spec.convolved(self._mixed("dw_sep_conv_1d.pw_conv", y_SX))
        return self._mixed("ext_pw_conv_1d", y_SE)

    def _mixed(self, name: str, x_SX: torch.Tensor) -> torch.Tensor:
        return F.linear(
            x_SX, self._weights[f"{name}.weight"][:, :, 0], self._weights[f"{name}.bias"]
        )
