"""A residual that fades as branches are added to it, by learned gates of each of its values, and a
norm whose weight stands before it (Muse Spark; transformers 5.23, modeling_muse_spark.py).

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope

LEAST = 1e-3
"""What is left of the residual's square, at least."""


class ResidualGate:
    """`join(residual_TE, branch_TE)`: sqrt(1 - b^2) of the residual and b of the branch, with
    b = sigmoid(gate / temperature) for each value; the gate is float32."""

    def __init__(self, scope: Scope, width: int, *, temperature: float) -> None:
        self._gate = scope.param("gate", (width,), init="zeros", dtype=torch.float32)
        self._temperature = temperature
        self._kept_E = self._taken_E = torch.empty(0)
        scope.on_finish(self._finish)

    def join(self, residual_TE: torch.Tensor, branch_TE: torch.Tensor) -> torch.Tensor:
        """The new residual, computed in float32."""
        joined_TE = self._kept_E * residual_TE + self._taken_E * branch_TE
        return joined_TE.to(residual_TE.dtype)

    def _finish(self) -> None:
        wide_E = self._gate.take() / self._temperature
        self._taken_E = wide_E.sigmoid()
        # (1 - b)(1 + b), of which the first factor is exact where b is near 1
        square_E = (-wide_E).sigmoid() * (1.0 + self._taken_E)
        self._kept_E = square_E.clamp(min=LEAST).sqrt()


@dataclass(frozen=True, kw_only=True)
class ScaledBeforeSpec:
    """A root mean square norm of x * (1 + w). `eps`: its own; None: that of the norms around it."""

    eps: float | None = None

    def build(self, scope: Scope, width: int, *, eps: float = 0.0) -> ScaledBefore:
        """See BlockNormSpec; `scope / "weight"` is w."""
        return ScaledBefore(scope, width, eps=eps if self.eps is None else self.eps)


class ScaledBefore:
    """`norm(x_TE)`: see ScaledBeforeSpec."""

    def __init__(self, scope: Scope, width: int, *, eps: float) -> None:
        self._weight = scope.param("weight", (width,), init="zeros")
        self._norm = RMS_NO_WEIGHT.build(scope, width, eps=eps)
        self._scale_E = torch.empty(0)
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return self._norm.norm((x_TE * self._scale_E).to(x_TE.dtype))

    def _finish(self) -> None:
        self._scale_E = self._weight.take_float(1.0)
