"""Branches that conformers share (Gulati et al. 2020): half an MLP, and a gated depthwise
convolution with a batch norm. S positions of one input, E width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope

EPS = 1e-5
"""Of norms whose epsilon no config states."""
Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """taps: of the depthwise convolution. bias: of linear layers, convolution_bias: of the gated
    convolution. looks_back: it sees no position behind its own, and has a norm of each position
    instead of one by statistics."""

    width: int
    inner: int
    taps: int
    bias: bool
    convolution_bias: bool
    activation: Activation
    looks_back: bool = False


class PlainHalf:
    """x_SE -> y_SE."""

    def __init__(self, scope: Scope, spec: BranchSpec) -> None:
        self._activation = spec.activation
        self._up = WholeLinear(scope / "linear1", spec.width, spec.inner, bias=spec.bias)
        self._down = WholeLinear(scope / "linear2", spec.inner, spec.width, bias=spec.bias)

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._activation(self._up.project(x_SE)))


class SilentConvolution:
    """x_SE -> y_SE; ghosts are silent in it."""

    def __init__(self, scope: Scope, spec: BranchSpec) -> None:
        self._spec, width = spec, spec.width
        shapes: dict[str, tuple[int, ...]] = {
            "pointwise_conv1.weight": (2 * width, width, 1),
            "depthwise_conv.weight": (width, 1, spec.taps),
            "pointwise_conv2.weight": (width, width, 1),
            "norm.weight": (width,),
            "norm.bias": (width,),
        }
        if not spec.looks_back:
            shapes |= {f"norm.running_{name}": (width,) for name in ("mean", "var")}
        if spec.convolution_bias:
            names = ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")
            shapes |= {f"{one}.bias": (shapes[f"{one}.weight"][0],) for one in names}
        self._params = {name: scope.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def forward(self, x_SE: torch.Tensor, real: int) -> torch.Tensor:
        """See the class."""
        at = self._weights
        up_SX = F.linear(
            x_SE, at["pointwise_conv1.weight"][:, :, 0], at.get("pointwise_conv1.bias")
        )
        y_SE = F.glu(up_SX, dim=-1)
        if real < y_SE.shape[0]:
            y_SE = torch.cat([y_SE[:real], torch.zeros_like(y_SE[real:])])
        kernel, taps, back = at["depthwise_conv.weight"], self._spec.taps, self._spec.looks_back
        y_AES = F.conv1d(
            F.pad(y_SE.T, (taps - 1, 0) if back else ((taps - 1) // 2, taps // 2))[None],
            kernel,
            at.get("depthwise_conv.bias"),
            groups=kernel.shape[0],
        )
        weight, bias = at["norm.weight"], at["norm.bias"]
        if back:
            y_SE = F.layer_norm(y_AES[0].T, (kernel.shape[0],), weight, bias, eps=EPS)
        else:
            mean, variance = at["norm.running_mean"], at["norm.running_var"]
            y_SE = F.batch_norm(y_AES, mean, variance, weight, bias, eps=EPS)[0].T
        y_SE = self._spec.activation(y_SE)
        return F.linear(y_SE, at["pointwise_conv2.weight"][:, :, 0], at.get("pointwise_conv2.bias"))
