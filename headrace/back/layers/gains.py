"""Learned factors: of what a branch or a norm gives, of each head's queries, and of the tokens'
embeddings, which a layer adds again (Talkie, 2026).

T tokens, E hidden size, H heads of this rank, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.norm import RMS_NO_WEIGHT, NormSpec
from headrace.back.layers.query_scale import QueryFactors
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard


@dataclass(frozen=True)
class BranchGainSpec:
    """In a norm's place behind a branch; its factor under this name."""

    name: str

    def build(self, scope: Scope, width: int, *, eps: float) -> BranchGain:
        """See BlockNormSpec."""
        return BranchGain(scope, self.name)


class BranchGain:
    """x_TE -> y_TE, every value times the one factor."""

    fusible = None
    """No GEMM does it."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._gain = scope.param(name, (1,), init="ones")
        self._gain_1 = torch.empty(0)
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return x_TE * self._gain_1

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds x into the residual, which is what is multiplied."""
        return self.norm(residual_TE.add_(x_TE))

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual likewise."""
        return self.add_norm(partial.total(), residual_TE)

    def _finish(self) -> None:
        self._gain_1 = self._gain.take()


@dataclass(frozen=True)
class GainedNormSpec:
    """A root mean square norm without a weight, but with a factor under this name, which a
    checkpoint may lack that has it in the weight behind."""

    name: str

    def build(self, scope: Scope, width: int, *, eps: float) -> GainedNorm:
        """See BlockNormSpec."""
        return GainedNorm(scope, self.name, width, eps=eps)


class GainedNorm:
    """x_TE -> y_TE; `add_norm` and `sum_norm` as of RMSNorm."""

    fusible = None
    """No GEMM does it."""

    def __init__(self, scope: Scope, name: str, width: int, *, eps: float) -> None:
        self._norm = RMS_NO_WEIGHT.build(scope, width, eps=eps)
        self._gain = scope.param(name, (1,), init="ones", optional=True)
        self._gain_1 = torch.empty(0)
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return self._norm.norm(x_TE) * self._gain_1

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds x into the residual and norms that."""
        return self._norm.add_norm(x_TE, residual_TE) * self._gain_1

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual and norms that."""
        return self._norm.sum_norm(partial, residual_TE) * self._gain_1

    def _finish(self) -> None:
        self._gain_1 = self._gain.take()


@dataclass(frozen=True)
class HeadGainSpec:
    """A factor for each query head, wherever its token stands, under this name."""

    name: str

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """See QueryScaling."""
        return HeadGain(scope, self.name, heads)


class HeadGain:
    """See HeadGainSpec and QueryFactors."""

    def __init__(self, scope: Scope, name: str, heads: int) -> None:
        shard = Shard(axis="tp", dim=0, parts=(Part(name, heads, heads),))
        self._gain = scope.param(name, (heads,), shard=shard, init="ones")
        self._gain_1H1 = torch.empty(0)
        scope.on_finish(self._finish)

    def factors(self, positions_T: torch.Tensor) -> torch.Tensor:
        """The same at all positions, [1, H, 1]."""
        return self._gain_1H1

    def _finish(self) -> None:
        self._gain_1H1 = self._gain.take()[None, :, None]


@dataclass(frozen=True)
class EmbeddingSkipsSpec:
    """The inputs of layers that each add the tokens' embeddings again."""

    def build(
        self, scope: Scope, width: int, layers: int, *, norms: NormSpec, eps: float
    ) -> EmbeddingSkips:
        """See LayerInputsSpec."""
        return EmbeddingSkips(layers)


class EmbeddingSkips:
    """See EmbeddingSkipsSpec."""

    media_id = 0

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def of(self, token_ids_T: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """The embeddings [L, T, E], which the residual leaves."""
        return x_TE.clone().expand(self._layers, -1, -1)


@dataclass(frozen=True)
class SkipTailSpec:
    """Adds a layer's input to the residual, times a factor of this name."""

    name: str

    def build(
        self, scope: Scope, width: int, *, activation: str, norms: NormSpec, eps: float
    ) -> Tail:
        """See LayerTailSpec."""
        return SkipTail(scope, self.name)


class SkipTail:
    """See SkipTailSpec and Tail."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._gain = scope.param(name, (1,), init="zeros")
        self._gain_1 = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, residual_TE: torch.Tensor, input_TP: torch.Tensor | None) -> torch.Tensor:
        """The residual, in place."""
        assert input_TP is not None, "the layer adds an input"
        return residual_TE.addcmul_(input_TP, self._gain_1)

    def _finish(self) -> None:
        self._gain_1 = self._gain.take()
