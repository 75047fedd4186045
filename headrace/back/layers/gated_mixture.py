"""A residual that each layer begins with a mixture of itself and of what it was before some layers
below, as far as a learned gate lets it (BerryLM, 2026).

T tokens, E hidden size, S 1 + kept states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.block_residual import BlockMixtureSpec, MixtureNames
from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class GatedMixtureSpec:
    """Before a layer with `kept` states below it, of which it adds one first if `keeps`: then they
    are one more. `name`: the module in its layer. `gated`: else the mixture takes the residual's
    place. See StateChangeSpec."""

    kept: int
    keeps: bool
    eps: float
    gated: bool = True
    name: str = "attn_res"

    def build(self, scope: Scope, width: int) -> GatedMixture:
        """`scope` is the layer's."""
        return GatedMixture(scope / self.name, self, width)


class GatedMixture:
    """See GatedMixtureSpec and StateChange; the state at hand is the first of the states."""

    def __init__(self, scope: Scope, spec: GatedMixtureSpec, width: int) -> None:
        mixture = BlockMixtureSpec(eps=spec.eps)
        self._mixture = mixture.build(scope, MixtureNames(query="pseudo_query"), width)
        self._spec = spec
        self._gate = scope.param("gate", (), init="zeros") if spec.gated else None
        self._share = torch.ones(())
        scope.on_finish(self._finish)

    def apply(self, states_STE: torch.Tensor) -> None:
        """In place."""
        kept, residual_TE = self._spec.kept, states_STE[0]
        if self._spec.keeps:
            kept += 1
            states_STE[kept] = residual_TE
        (mixed_TE,) = self._mixture.of(states_STE[: kept + 1])
        residual_TE.add_((mixed_TE - residual_TE).mul_(self._share))

    def _finish(self) -> None:
        if self._gate is not None:
            gate = self._gate.take()
            self._share = gate.float().tanh().to(gate.dtype)
