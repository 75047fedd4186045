"""A gated MLP whose gate and other factor stay within a bound (GLM-5.3's tower).

N rows, E width.
"""

from __future__ import annotations

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace
from headrace.back.layers.scope import Scope


class BoundedMLP:
    """x_NE -> y_NE: the gate is `bound` at most, the other factor between its two signs."""

    def __init__(
        self, scope: Scope, place: FeedForwardPlace, *, bound: float, bias: bool = False
    ) -> None:
        width, inner = place.width, place.inner
        self._bound = bound
        self._gate = WholeLinear(scope / "gate_proj", width, inner, bias=bias)
        self._up = WholeLinear(scope / "up_proj", width, inner, bias=bias)
        self._down = WholeLinear(scope / "down_proj", inner, width, bias=bias)
        self._activation = ElementwiseActivation(scope, place.activation)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        gate_NI = self._activation.apply(self._gate.project(x_NE).clamp(max=self._bound))
        up_NI = self._up.project(x_NE).clamp(-self._bound, self._bound)
        return self._down.project(gate_NI * up_NI)
