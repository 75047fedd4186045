"""The conformer of Granite Speech 5: attention within blocks with learned relative places (Shaw et
al. 2018), and layers whose convolution halves the positions, beside means of two of them. Half way
through, what the head would say is added to the residual (Nozaki and Komatsu 2021). transformers
5.23, modeling_granite_speech5.py.

S positions of one input, B blocks of C positions, H heads, D of a head, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.conformer_branches import EPS, BranchSpec, PlainHalf
from headrace.back.layers.audio.shaw_conformer import position_blocks, shaw_attended
from headrace.back.layers.classifier import Dense
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.base.wire.media import Strides

HALF = (2, 2, 0)
"""What a halving layer does with the number of positions."""


@dataclass(frozen=True, kw_only=True)
class HalvingConformerSpec:
    """bands: of a row of frames. halving: the layers that halve. block: positions that see each
    other; farthest: of relative places. expansion: of the convolution's width. labels: of the head
    half way through."""

    bands: int
    layers: int
    halving: tuple[int, ...]
    heads: int
    block: int
    farthest: int
    expansion: int
    labels: int
    branches: BranchSpec

    @property
    def width(self) -> int:
        """E"""
        return self.branches.width

    @property
    def strides(self) -> Strides:
        """Along time."""
        return (HALF,) * len(self.halving)

    def build(self, scope: Scope) -> HalvingConformer:
        """See ConformerSpec."""
        return HalvingConformer(scope, self)


class HalvingConformer:
    """frames_NM -> x_SE of one input. `out`: the head half way through, to which the last one may
    be tied."""

    def __init__(self, scope: Scope, spec: HalvingConformerSpec) -> None:
        self.width = spec.width
        self._spec, width = spec, spec.width
        self._into = WholeLinear(scope / "input_linear", spec.bands, width, bias=True)
        self._layers = [
            HalvingLayer(scope / "layers" / str(i), spec, halves=i in spec.halving)
            for i in range(spec.layers)
        ]
        self.out = Dense(scope / "out", width, spec.labels, bias=True)
        self._back = WholeLinear(scope / "out_mid", spec.labels, width, bias=True)

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See Conformer; there are no ghosts."""
        assert not ghosts, ghosts
        x_SE = self._into.project(frames_NM)
        for number, layer in enumerate(self._layers, start=1):
            x_SE = layer.forward(x_SE)
            if number == self._spec.layers // 2:
                x_SE = x_SE + self._back.project(self.out.project(x_SE).softmax(-1))
        return x_SE


class HalvingLayer:
    """x_SE -> x_SE, or with `halves` half as many."""

    def __init__(self, scope: Scope, spec: HalvingConformerSpec, *, halves: bool) -> None:
        self._halves = halves
        self._mlps = [PlainHalf(scope / f"feed_forward{i}", spec.branches) for i in (1, 2)]
        self._attention = BlockAttention(scope / "self_attn", spec)
        self._convolution = StridedConvolution(scope / "conv", spec, stride=2 if halves else 1)
        names = ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        self._norms = [LAYER.build(scope / f"norm_{one}", spec.width, eps=EPS) for one in names]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        first, attention, convolution, second, last = self._norms
        x_SE = x_SE + 0.5 * self._mlps[0].forward(first.norm(x_SE))
        x_SE = x_SE + self._attention.forward(attention.norm(x_SE))
        y_SE = self._convolution.forward(convolution.norm(x_SE))
        if self._halves:
            pairs = x_SE.shape[0] // 2
            x_SE = x_SE[: 2 * pairs].unflatten(0, (pairs, 2)).mean(1)
            y_SE = y_SE[:pairs]
        x_SE = x_SE + y_SE
        x_SE = x_SE + 0.5 * self._mlps[1].forward(second.norm(x_SE))
        return last.norm(x_SE)


class BlockAttention:
    """x_SE -> y_SE within blocks."""

    def __init__(self, scope: Scope, spec: HalvingConformerSpec) -> None:
        self._spec, width = spec, spec.width
        self._query, self._key, self._value = (
            WholeLinear(scope / f"{one}_proj", width, width) for one in "qkv"
        )
        self._out = WholeLinear(scope / "o_proj", width, width, bias=True)
        shape = (2 * spec.farthest + 1, width // spec.heads)
        self._places = scope.param("rel_pos_emb.weight", shape)
        self._place_CCD, self._device = torch.empty(0), scope.device
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        block = torch.arange(self._spec.block, device=self._device)
        distance_CC = block[:, None] - block
        self._place_CCD = self._places.take()[distance_CC + self._spec.farthest]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        blocks = position_blocks((x_SE.shape[0],), self._spec.block, x_SE.device)
        q_BHCD, k_BHCD, v_BHCD = (
            one.project(x_SE)[blocks.place_BC].unflatten(2, (self._spec.heads, -1)).transpose(1, 2)
            for one in (self._query, self._key, self._value)
        )
        y_BHCD = shaw_attended(q_BHCD, k_BHCD, v_BHCD, self._place_CCD, blocks.inside_BC)
        y_NE = y_BHCD.transpose(1, 2).flatten(2).flatten(0, 1)
        return self._out.project(y_NE.index_select(0, blocks.at_T))


class StridedConvolution:
    """x_SE -> y_SE, every `stride`-th of them."""

    def __init__(self, scope: Scope, spec: HalvingConformerSpec, *, stride: int) -> None:
        self._stride, self._taps = stride, spec.branches.taps
        width, inner = spec.width, spec.width * spec.expansion
        self._up = WholeLinear(scope / "pointwise_lin1", width, 2 * inner, bias=True)
        self._down = WholeLinear(scope / "pointwise_lin2", inner, width, bias=True)
        names = ("running_mean", "running_var", "weight", "bias")
        self._params = [scope.param("depthwise_conv.weight", (inner, 1, self._taps))]
        self._params += [scope.param(f"norm.{name}", (inner,)) for name in names]
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [param.take() for param in self._params]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        kernel, mean, variance, weight, bias = self._weights
        y_AXS = F.glu(self._up.project(x_SE), dim=-1).T[None]
        y_AXS = F.conv1d(
            y_AXS,
            kernel,
            stride=self._stride,
            padding=(self._taps - 1) // 2,
            groups=kernel.shape[0],
        )
        y_AXS = F.silu(F.batch_norm(y_AXS, mean, variance, weight, bias, eps=EPS))
        return self._down.project(y_AXS[0].T.contiguous())
