"""The gated MLP of a decoder layer: down(act(gate(x)) * up(x))."""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_act.op import OP, GatedAct, GatedActProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part


class GatedMLP:
    """x_TE -> y_TE. `merged` names the checkpoint tensor that holds gate and up, if they are one
    there (Phi-3); `down` the one that leads back."""

    def __init__(
        self,
        scope: Scope,
        width: int,
        inner: int,
        *,
        activation: str,
        bias: bool = False,
        merged: str | None = None,
        down: str = "down_proj",
    ) -> None:
        parts = (Part("gate_proj", inner, inner), Part("up_proj", inner, inner))
        self._gate_up = ColumnLinear(scope, width, parts, bias=bias, merged=merged)
        self._down = RowLinear(scope / down, parts[0], width, bias=bias)
        self._act: GatedAct = not_loaded
        self._scope = scope
        self._activation = activation
        scope.on_finish(self._finish)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._act(self._gate_up.project(x_TE)))

    def _finish(self) -> None:
        problem = GatedActProblem(
            device=self._scope.device.type,
            dtype=self._scope.dtype,
            width=self._gate_up.sizes[0],
            activation=self._activation,
        )
        self._act = self._scope.bind(OP, problem)
