"""A linear layer whose inputs and outputs come in groups that do not see each other: a convolution
of one tap in groups. Every rank computes it whole.

T tokens, I inputs, O outputs, G groups.
"""

from __future__ import annotations

import torch

from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.scope import Scope


class GroupedDense:
    """x_TI -> y_TO. `scope` holds weight [O, I / G, 1] and bias [O], or with `turned` [G, I / G,
    O / G]."""

    def __init__(
        self, scope: Scope, inputs: int, outputs: int, groups: int, *, turned: bool = False
    ) -> None:
        self._groups, self._turned = groups, turned
        shape = (outputs, inputs // groups, 1)
        if turned:
            shape = (groups, inputs // groups, outputs // groups)
        self._weight = scope.param("weight", shape)
        self._bias = scope.param("bias", (outputs,), init="zeros")
        self._weight_GIO, self._bias_O = torch.empty(0), torch.empty(0)
        scope.on_finish(self._finish)

    def project(self, x_TI: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_GTI = x_TI.unflatten(1, (self._groups, -1)).transpose(0, 1)
        y_TGO = torch.bmm(x_GTI, self._weight_GIO).transpose(0, 1)
        return y_TGO.flatten(1) + self._bias_O

    def _finish(self) -> None:
        weight = self._weight.take()
        if not self._turned:
            weight = weight.squeeze(2).unflatten(0, (self._groups, -1)).transpose(1, 2)
        self._weight_GIO, self._bias_O = weight.contiguous(), self._bias.take()


class GroupedMLP:
    """x_TE -> down(act(up(x))) of two of them."""

    def __init__(
        self, up: GroupedDense, down: GroupedDense, activation: ElementwiseActivation
    ) -> None:
        self._up, self._down, self._activation = up, down, activation

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._activation.apply(self._up.project(x_TE)))
