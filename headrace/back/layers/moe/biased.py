"""A mixture to whose results a bias is added, once for each token.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class BiasedMixtureSpec:
    """`bias`: its name in the mixture's module."""

    mixture: MixtureSpec
    bias: str = "bias"

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return BiasedMixture(scope, self, place)


class BiasedMixture:
    """x_TE -> y_TE: see BiasedMixtureSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: BiasedMixtureSpec, place: FeedForwardPlace) -> None:
        self._mixture = spec.mixture.build(scope, replace(place, norm=None))
        at = scope / spec.mixture.name
        self._bias = at.param(spec.bias, (place.width,), init="zeros")
        self._bias_E = torch.empty(0)
        scope.on_finish(self._finish)

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        y_TE = self._mixture.forward_into(x_TE, residual_TE)
        assert y_TE is not None, "a mixture leaves its sum to whoever adds it"
        if not isinstance(y_TE, Partial):
            return y_TE + self._bias_E
        return y_TE if y_TE.axis.rank else Partial(y_TE.share + self._bias_E, y_TE.axis)

    def _finish(self) -> None:
        self._bias_E = self._bias.take()
