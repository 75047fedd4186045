"""Attention over a residual's past (Kimi team 2026, "Attention residuals"): the layers' sums are
kept by blocks of layers, and what a branch reads is a mixture of the finished blocks and of the one
at hand, by a query that is learned. The mixture is computed in float32: it is of few vectors.

The residual is [S, T, E]: first the block at hand, then the finished ones. T tokens, E hidden size,
S blocks and one, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class MixtureNames:
    """Of a mixture's tensors in its layer: `query` [1, E], [E] or [Q, E] by its `shape`, and the
    `norm` of what it is compared with, if that has a weight."""

    query: str
    norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class BlockMixtureSpec:
    """How vectors are compared and mixed: by their norms' products with the query, times `scale`.
    `normed`: what is mixed is normed, too."""

    eps: float
    scale: float = 1.0
    normed: bool = False

    def build(
        self, scope: Scope, names: MixtureNames, width: int, *, shape: tuple[int, ...] = ()
    ) -> BlockMixture:
        """`shape`: of the query before its width."""
        return BlockMixture(scope, self, names, width, shape)


class BlockMixture:
    """x_STE -> Q mixtures [T, E]: see BlockMixtureSpec."""

    def __init__(
        self,
        scope: Scope,
        spec: BlockMixtureSpec,
        names: MixtureNames,
        width: int,
        shape: tuple[int, ...],
    ) -> None:
        self._spec, self._width = spec, width
        self._query = scope.param(names.query, (*shape, width), init="zeros")
        self._norm = names.norm and scope.param(names.norm, (width,), init="ones")
        self._key_QE = torch.empty(0)
        scope.on_finish(self._finish)

    def of(self, x_STE: torch.Tensor) -> list[torch.Tensor]:
        """The mixtures of the vectors that there are, in the queries' order. Sums go one after the
        other, so that a token's bits are its own."""
        wide_STE = x_STE.float()
        mean_ST1 = wide_STE.square().mean(-1, keepdim=True)
        normed_STE = wide_STE * torch.rsqrt(mean_ST1 + self._spec.eps)
        value_STE = normed_STE if self._spec.normed else wide_STE
        mixtures = []
        for key_E in self._key_QE:
            weight_ST1 = (normed_STE * key_E).sum(-1, keepdim=True).softmax(0)
            sum_TE = weight_ST1[0] * value_STE[0]
            for weight_T1, value_TE in zip(weight_ST1[1:], value_STE[1:], strict=True):
                sum_TE = sum_TE + weight_T1 * value_TE
            mixtures.append(sum_TE.to(x_STE.dtype))
        return mixtures

    def _finish(self) -> None:
        key_QE = self._query.take().float().view(-1, self._width) * self._spec.scale
        if self._norm is not None:
            key_QE = key_QE * self._norm.take().float()
        self._key_QE = key_QE


@dataclass(frozen=True, kw_only=True)
class BlockResidualSpec:
    """The residual of a decoder of so many `layers`, whose blocks are of `size` layers. See
    ResidualStreamsSpec; `end`: names of the last mixture."""

    layers: int
    size: int
    mixture: BlockMixtureSpec
    end: MixtureNames
    shape: tuple[int, ...] = ()

    def build(self, scope: Scope, width: int) -> BlockResidual:
        """`scope` is that of the embedding."""
        mixture = self.mixture.build(scope, self.end, width, shape=self.shape)
        return BlockResidual(self.before(self.layers), mixture)

    def before(self, layer: int) -> int:
        """How many blocks are finished before this layer."""
        return -(-layer // self.size)

    def begins(self, layer: int) -> bool:
        """Whether this layer finishes the block at hand and begins another."""
        return layer % self.size == 0


class BlockResidual:
    """See ResidualStreams."""

    def __init__(self, blocks: int, mixture: BlockMixture) -> None:
        self._blocks, self._mixture = blocks, mixture

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The embeddings are the block at hand."""
        x_STE = x_TE.new_zeros((1 + self._blocks, *x_TE.shape))
        x_STE[0] = x_TE
        return x_STE

    def end(self, x_STE: torch.Tensor, /) -> torch.Tensor:
        """One more mixture."""
        return self._mixture.of(x_STE)[0]
