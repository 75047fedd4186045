"""One matrix in place of a layer's attention, or of its MLP: y = W x (Bercovich et al. 2024,
"Puzzle"). It mixes no tokens and keeps no cache.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import RowLinear
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard


@dataclass(frozen=True, kw_only=True)
class LinearMixerSpec:
    """See MixerSpec. `name`: of the matrix in the layer."""

    name: str
    width: int

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> LinearBranch:
        """See MixerSpec."""
        return LinearBranch(scope / self.name, self.width, adds=adds)


@dataclass(frozen=True, kw_only=True)
class LinearFeedForwardSpec:
    """See FeedForwardSpec. `name`: of the matrix in the layer."""

    name: str

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return LinearBranch(scope / self.name, place.width, adds=place.adds)


class LinearBranch:
    """x_TE -> y_TE, as Mixer and as FeedForward; a rank has a share of the inputs."""

    kv_forms: tuple[CacheForm, ...] = ()
    norms = False
    probed = False

    def __init__(self, scope: Scope, width: int, *, adds: bool) -> None:
        part = Part("inputs", width, width)
        (span,) = Shard(axis="tp", dim=0, parts=(part,)).spans(scope.mesh.tp)
        self._columns = slice(span.start, span.start + span.size)
        self._linear = RowLinear(scope, part, width, adds=adds)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rank's share of the inputs."""
        x_TI = x_TE[:, self._columns]
        return x_TI if at_N is None else x_TI.index_select(0, at_N)

    def attend_into(
        self, handed_TI: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._linear.project_into(handed_TI, residual_TE)

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._linear.project_into(x_TE[:, self._columns], residual_TE)
