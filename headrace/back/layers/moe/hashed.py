"""A mixture whose experts are stated for each token by a table, not scored; the router's scores
weigh them (hash layers: Roller et al. 2021; DeepSeek V4, section 2.1).

T tokens, E hidden size, X experts, K stated for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.mlp import FeedForwardPlace
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class HashedMixtureSpec:
    """`vocabulary`: rows of the table, a tensor of the router's module."""

    mixture: MixtureSpec
    vocabulary: int
    table: str = "gate.tid2eid"

    def build(self, scope: Scope, place: FeedForwardPlace) -> HashedMixture:
        """See FeedForwardSpec; but its place gives the tokens, too."""
        return HashedMixture(scope, self, place)


class HashedMixture:
    """x_TE -> y_TE: see HashedMixtureSpec."""

    def __init__(self, scope: Scope, spec: HashedMixtureSpec, place: FeedForwardPlace) -> None:
        mixture, at = spec.mixture, scope / spec.mixture.name
        self._experts, self._axis = mixture.router.experts, scope.mesh.tp
        self._mixture = Mixture(
            at, mixture, place.width, activation=mixture.activation or place.activation
        )
        shape = (spec.vocabulary, mixture.router.top_k)
        self._param = at.param(spec.table, shape, dtype=torch.int64, init="zeros")
        self._table_VK = torch.empty(0)
        scope.on_finish(self._finish)

    def forward_tokens(self, x_TE: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """y_TE, summed over the ranks."""
        stated_TX = torch.zeros((len(x_TE), self._experts), dtype=torch.bool, device=x_TE.device)
        stated_TX.scatter_(1, self._table_VK[token_ids_T], True)
        share_TE = self._mixture.mixed(x_TE, x_TE, stated_TX)
        return share_TE if self._axis.size == 1 else Partial(share_TE, self._axis).total()

    def _finish(self) -> None:
        self._table_VK = self._param.take()
