"""The conformer of LASR, Google's medical speech model: two convolutions along time make one
position of four frames, places turn queries and keys, and each branch is added in shares of its
own. transformers 5.23, modeling_lasr.py.

N frames of M bands of one input, S positions, H heads, D of a head, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.audio.conformer_branches import (
    BranchSpec,
    PlainHalf,
    SilentConvolution,
)
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER_NO_BIAS
from headrace.back.layers.scope import Scope
from headrace.base.wire.media import Strides


@dataclass(frozen=True, kw_only=True)
class TurningConformerSpec:
    """channels: of the second convolution; seen, step: frames that both see, and their stride.
    mlp_shares, convolution_shares: of what goes into a branch and of what comes out of it. theta:
    of places."""

    bands: int
    channels: int
    seen: int
    step: int
    layers: int
    heads: int
    eps: float
    theta: float
    mlp_shares: tuple[float, float]
    convolution_shares: tuple[float, float]
    branches: BranchSpec

    @property
    def width(self) -> int:
        """E"""
        return self.branches.width

    @property
    def strides(self) -> Strides:
        """Along time."""
        return ((self.seen, self.step, 0),) * 2

    def build(self, scope: Scope) -> TurningConformer:
        """See ConformerSpec."""
        return TurningConformer(scope, self)


class TurningConformer:
    """frames_NM -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: TurningConformerSpec) -> None:
        self.width = spec.width
        self._spec, width, inside = spec, spec.width, scope / "subsampler"
        self._into = WholeLinear(inside / "dense_0", spec.bands, width, bias=True)
        self._out = WholeLinear(inside / "dense_1", spec.channels, width, bias=True)
        self._convolutions = [
            (
                inside.param(f"conv_{index}.weight", (outputs, width, spec.seen)),
                inside.param(f"conv_{index}.bias", (outputs,)),
            )
            for index, outputs in enumerate((width, spec.channels))
        ]
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = [
            TurningLayer(scope / "layers" / str(index), spec) for index in range(spec.layers)
        ]
        self._norm = LAYER_NO_BIAS.build(scope / "out_norm", width, eps=spec.eps)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See Conformer; there are no ghosts."""
        assert not ghosts, ghosts
        x_AEN = F.relu(self._into.project(frames_NM)).T[None]
        for weight, bias in self._weights:
            x_AEN = F.relu(F.conv1d(x_AEN, weight, bias, stride=self._spec.step))
        x_SE = self._out.project(x_AEN[0].T.contiguous())
        turns = self._turns(x_SE)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, turns)
        return self._norm.norm(x_SE)

    def _turns(self, x_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [S, 1, D] of each place."""
        dims = self._spec.width // self._spec.heads
        scales = self._spec.theta ** -(torch.arange(0, dims, 2).float() / dims)
        angles = torch.arange(x_SE.shape[0])[:, None].float() * scales
        doubled = planned(torch.cat((angles, angles), dim=1)[:, None], x_SE.device)
        return doubled.cos().to(x_SE.dtype), doubled.sin().to(x_SE.dtype)


class TurningLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: TurningConformerSpec) -> None:
        self._spec, width, bias = spec, spec.width, spec.branches.bias
        self._mlps = [PlainHalf(scope / f"feed_forward{i}", spec.branches) for i in (1, 2)]
        self._convolution = SilentConvolution(scope / "conv", spec.branches)
        self._query, self._key, self._value, self._out = (
            WholeLinear(scope / "self_attn" / f"{one}_proj", width, width, bias=bias)
            for one in "qkvo"
        )
        names = ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        self._norms = [
            LAYER_NO_BIAS.build(scope / f"norm_{one}", width, eps=spec.eps) for one in names
        ]

    def forward(self, x_SE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`turns`: cosines and sines of places."""
        first, attention, convolution, second, last = self._norms
        kept, added = self._spec.mlp_shares
        x_SE = kept * x_SE + added * self._mlps[0].forward(first.norm(x_SE))
        x_SE = x_SE + self._attended(attention.norm(x_SE), turns)
        y_SE = self._convolution.forward(convolution.norm(x_SE), x_SE.shape[0])
        x_SE = self._spec.convolution_shares[0] * x_SE + self._spec.convolution_shares[1] * y_SE
        x_SE = kept * x_SE + added * self._mlps[1].forward(second.norm(x_SE))
        return last.norm(x_SE)

    def _attended(
        self, x_SE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        shape = (self._spec.heads, -1)
        q_SHD, k_SHD, v_SHD = (
            one.project(x_SE).unflatten(1, shape) for one in (self._query, self._key, self._value)
        )
        q, k, v = (
            one.transpose(0, 1)[None]
            for one in (_turned(q_SHD, turns), _turned(k_SHD, turns), v_SHD)
        )
        y_HSD = F.scaled_dot_product_attention(q, k, v)[0]
        return self._out.project(y_HSD.transpose(0, 1).flatten(1))


def _turned(x_SHD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    low, high = x_SHD.chunk(2, dim=-1)
    return x_SHD * turns[0] + torch.cat((-high, low), dim=-1) * turns[1]
