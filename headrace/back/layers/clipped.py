"""Linear layers whose inputs and outputs are cut to learned bounds (Gemma 4)."""

from __future__ import annotations

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope

CLIPS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear:
    """x_NI -> y_NO, cut to learned bounds before and behind where the tower clips. Its weight lies
    in `module`, its bounds beside that."""

    def __init__(
        self,
        scope: Scope,
        inputs: int,
        outputs: int,
        *,
        clipped: bool,
        module: str = "linear",
    ) -> None:
        self._linear = WholeLinear(scope / module if module else scope, inputs, outputs)
        self._params = [scope.param(name, ()) for name in CLIPS] if clipped else []
        self._bounds: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def project(self, x_NI: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if not self._bounds:
            return self._linear.project(x_NI)
        low, high, least, most = self._bounds
        return self._linear.project(torch.clamp(x_NI, low, high)).clamp_(least, most)

    def _finish(self) -> None:
        self._bounds = [param.take() for param in self._params]
