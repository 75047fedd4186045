"""A norm whose result is gated by itself: y * sigmoid(up(silu(down(y)))), y = rms_norm(x), through
a bottleneck (A.X K2).

T tokens, E hidden size, R its rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.activation.op import OP as ACTIVATION
from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class GatedBlockNormSpec:
    """A kind of norm, as NormSpec. `rank`: R."""

    rank: int

    def build(self, scope: Scope, width: int, *, eps: float) -> GatedBlockNorm:
        """The norm lies below `scope` as "norm", beside "W_down" and "W_up"."""
        return GatedBlockNorm(scope, width, self.rank, eps=eps)


class GatedBlockNorm:
    """x_TE -> y_TE; `add_norm` and `sum_norm` as of RMSNorm."""

    fusible = None
    """No GEMM does it."""

    def __init__(self, scope: Scope, width: int, rank: int, *, eps: float) -> None:
        self._norm = RMS.build(scope / "norm", width, eps=eps)
        self._down = WholeLinear(scope / "W_down", width, rank)
        self._up = WholeLinear(scope / "W_up", rank, width)
        self._act: Activation = not_loaded
        self._product: GatedNorm = not_loaded
        self._scope, self._width = scope, width
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return self._gated(self._norm.norm(x_TE))

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds x into the residual and norms that."""
        return self._gated(self._norm.add_norm(x_TE, residual_TE))

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual and norms that."""
        return self._gated(self._norm.sum_norm(partial, residual_TE))

    def _gated(self, y_TE: torch.Tensor) -> torch.Tensor:
        gate_TE = self._up.project(self._act(self._down.project(y_TE)))
        return self._product(y_TE, gate_TE)

    def _finish(self) -> None:
        facts = {"device": self._scope.kind, "dtype": self._scope.dtype}
        self._act = self._scope.bind(ACTIVATION, ActivationProblem(**facts, activation="silu"))
        product = GatedNormProblem(**facts, width=self._width, group=0, gate="sigmoid")
        self._product = self._scope.bind(GATED_NORM, product, None)
