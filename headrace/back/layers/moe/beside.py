"""A gated MLP beside a mixture that is not one of its experts: it has a width or a bound of its
own. The two are summed.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.moe.lone import LoneExpert
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial

__all__ = ["BesideSpec", "LoneExpert"]


@dataclass(frozen=True, kw_only=True)
class BesideSpec:
    """A mixture and an MLP beside it, as a layer's feed-forward. The mixture has no shared
    experts."""

    mixture: MixtureSpec
    shared: LoneExpert

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return Beside(scope, self, place)


class Beside:
    """x_TE -> y_TE: see BesideSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: BesideSpec, place: FeedForwardPlace) -> None:
        self._mixture = spec.mixture.build(scope, replace(place, norm=None))
        self._lone = spec.shared.build(scope, place)
        self._axis = scope.mesh.tp

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        y_TE = self._lone.share(x_TE)
        routed = self._mixture.forward_into(x_TE, residual_TE)
        assert routed is not None, "a mixture leaves its sum to whoever adds it"
        if isinstance(routed, Partial):
            return Partial(routed.share + y_TE, self._axis)
        return routed + (y_TE if self._axis.size == 1 else Partial(y_TE, self._axis).total())
