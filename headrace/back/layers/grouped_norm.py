"""A root mean square norm over groups of a layer's values (K2 Horizon).

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.rms_norm.op import OP, Norm, RMSNormProblem
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class GroupedNormSpec:
    """A kind of norm, as NormSpec: `groups` of neighbouring values have a mean square each."""

    groups: int

    def build(self, scope: Scope, width: int, *, eps: float) -> GroupedNorm:
        """See BlockNormSpec; `scope / "weight"` is that of all values."""
        return GroupedNorm(scope, width, self.groups, eps=eps)


class GroupedNorm:
    """x_TE -> y_TE; `add_norm` and `sum_norm` as of RMSNorm."""

    fusible = None
    """No GEMM does it."""

    def __init__(self, scope: Scope, width: int, groups: int, *, eps: float) -> None:
        self._weight = scope.param("weight", (width,), init="ones")
        self._scope = scope
        self._problem = RMSNormProblem(
            device=scope.kind, dtype=scope.dtype, width=width // groups, eps=eps
        )
        self._of_group: Norm = not_loaded
        self._weight_E = torch.empty(0)
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        y_PG = self._of_group(x_TE.reshape(-1, self._problem.width))
        return y_PG.view(x_TE.shape) * self._weight_E

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds x into the residual and norms that."""
        return self.norm(residual_TE.add_(x_TE))

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual and norms that."""
        return self.add_norm(partial.total(), residual_TE)

    def _finish(self) -> None:
        ones = torch.ones(self._problem.width, device=self._scope.device)
        self._of_group = self._scope.bind(OP, self._problem, ones)
        self._weight_E = self._weight.take().to(self._scope.dtype)
