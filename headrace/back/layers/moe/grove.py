"""A mixture of experts in groups, each with a small adjugate expert that a token takes once for
every member of the group that it takes, with that member's weight (Wu et al. 2025, "Grove MoE").

T tokens, E hidden size, X experts, K slots of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.moe.experts import ExpertSet, bind_experts
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec
from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.moe.weights import ExpertLayout
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import local_size


@dataclass(frozen=True, kw_only=True)
class GroveSpec:
    """A mixture as a layer's feed-forward. `members`: experts of a group; `inner`: of an adjugate
    expert, whose results are times `scale`; `layout`: where these lie in the mixture's module."""

    mixture: MixtureSpec
    members: int
    inner: int
    scale: float
    layout: ExpertLayout

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return GroveMixture(scope / self.mixture.name, self, place)


class GroveMixture(Mixture):
    """x_TE -> y_TE: see GroveSpec."""

    def __init__(self, scope: Scope, spec: GroveSpec, place: FeedForwardPlace) -> None:
        super().__init__(
            scope, spec.mixture, place.width, activation=place.activation, adds=place.adds
        )
        assert spec.mixture.shared is None and not spec.mixture.router.idle, spec
        router = spec.mixture.router
        self._grove, self._activated = spec, place.activation
        self._beside = replace(scope, host_experts=None)
        sizes = ExpertSizes(
            experts=router.experts // spec.members, width=place.width, inner=spec.inner
        )
        first = len(scope.ledger.params)
        loaded = spec.layout.params(self._beside, sizes)
        params = scope.ledger.params[first:]
        for param in params:
            param.routed = sizes.experts, min(router.top_k, sizes.experts)
        self._beside_sizes = sizes.experts, place.width, local_size(sizes.part, scope.mesh.tp)
        self._set = ExpertSet(self._beside, loaded, params, sizes=self._beside_sizes)
        self._adjugates = not_loaded
        scope.on_finish(self._finish_adjugates)

    def of_chosen(
        self, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """See Mixture."""
        y_TE = super().of_chosen(x_TE, expert_TK, weight_TK)
        group_TK = expert_TK // self._grove.members
        return y_TE + self._adjugates(x_TE, group_TK, weight_TK * self._grove.scale)

    def _finish_adjugates(self) -> None:
        groups, width, inner = self._beside_sizes
        problem = ExpertsProblem(
            device=self._beside.kind,
            dtype=self._beside.dtype,
            experts=groups,
            slots=self._grove.mixture.router.top_k,
            width=width,
            inner=inner,
            activation=self._activated,
            bias=self._grove.layout.biased,
        )
        self._adjugates = bind_experts(self._beside, problem, self._set.take(), None)
