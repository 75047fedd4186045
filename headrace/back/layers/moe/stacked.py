"""Experts' weights that lie one after another in 2-D tensors: gates, ups, and downs turned
(DBRX), or in 3-D ones of which gates and ups take turns (Inkling); and those of experts without
gates. X experts, E hidden size, I inner size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.moe.split import ExpertSizes
from headrace.back.layers.moe.weights import (
    Biases,
    ExpertWeights,
    LoadedExperts,
    Unbiased,
    gates_first,
    turned,
)
from headrace.back.layers.scope import Scope
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Shard


@dataclass(frozen=True, kw_only=True)
class FlatExperts:
    """Three tensors [X * I, E]."""

    gate: str
    up: str
    down: str
    biased = False
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        shape, rows = (sizes.experts * sizes.inner, sizes.width), _rows(sizes)
        gate = scope.param(self.gate, shape, shard=rows)
        up = scope.param(self.up, shape, shard=rows)
        down = scope.param(self.down, shape, shard=rows)
        local = sizes.local(scope.mesh)
        each = (local.experts, local.inner, sizes.width)

        def arranged() -> tuple[torch.Tensor, torch.Tensor]:
            up_XIE = torch.cat([one.take().view(each) for one in (gate, up)], dim=1)
            return up_XIE, turned(down.take().view(each))

        return Unbiased(arranged)


@dataclass(frozen=True, kw_only=True)
class PairedExperts:
    """One tensor [X, 2I, E] of gates and ups in turn, and one [X, E, I]."""

    up: str
    down: str
    biased = False
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        rows = sizes.over(1, sizes.pairs)
        up = scope.param(self.up, (count, 2 * inner, width), shard=rows)
        down = scope.param(self.down, (count, width, inner), shard=sizes.over(2))
        return Unbiased(lambda: (gates_first(up.take()), down.take()))


@dataclass(frozen=True, kw_only=True)
class UngatedExperts:
    """An up and a down tensor for each expert, {} for its number: down(act(up(x))). The activation
    takes what is up here as the gate of ups that are 1: weights of zeros with a bias, for the
    kernels of any experts. `up_bias`, `down_bias`: the names of their biases, of both or neither.
    """

    up: str
    down: str
    up_bias: str | None = None
    down_bias: str | None = None
    biased = True
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        return _Ungated(scope, sizes, self)


@dataclass(frozen=True, kw_only=True)
class FlatUngatedExperts:
    """The same in two tensors [X * I, E], the downs turned (Nomic Embed 2)."""

    up: str
    down: str
    biased = True
    adapted = None

    def params(self, scope: Scope, sizes: ExpertSizes) -> LoadedExperts:
        """See ExpertLayout."""
        return _FlatUngated(scope, sizes, self)


class _UngatedBiases:
    matrices = None

    def __init__(self, scope: Scope, sizes: ExpertSizes) -> None:
        self._sizes, self._local = sizes, sizes.local(scope.mesh)
        self._like = torch.empty(0, dtype=scope.dtype, device=scope.params_device)

    def biases(self) -> Biases:
        """See LoadedExperts."""
        ones_XI = self._like.new_ones(self._local.experts, self._local.inner)
        down_XE = self._like.new_zeros(self._local.experts, self._sizes.width)
        return torch.cat((torch.zeros_like(ones_XI), ones_XI), dim=1), down_XE

    def weights(self, up_XIE: torch.Tensor, down_XEI: torch.Tensor) -> ExpertWeights:
        """Gates, and ups of zeros."""
        up_bias_XI, down_bias_XE = self.biases()
        return ExpertWeights(
            up_XIE=torch.cat((up_XIE, torch.zeros_like(up_XIE)), dim=1),
            down_XEI=down_XEI,
            up_bias_XI=up_bias_XI,
            down_bias_XE=down_bias_XE,
        )


class _FlatUngated(_UngatedBiases):
    def __init__(self, scope: Scope, sizes: ExpertSizes, names: FlatUngatedExperts) -> None:
        super().__init__(scope, sizes)
        shape, rows = (sizes.experts * sizes.inner, sizes.width), _rows(sizes)
        self._up = scope.param(names.up, shape, shard=rows)
        self._down = scope.param(names.down, shape, shard=rows)

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        each = (self._local.experts, self._local.inner, self._sizes.width)
        return self.weights(self._up.take().view(each), turned(self._down.take().view(each)))


class _Ungated(_UngatedBiases):
    def __init__(self, scope: Scope, sizes: ExpertSizes, names: UngatedExperts) -> None:
        super().__init__(scope, sizes)
        count, width, inner = sizes.experts, sizes.width, sizes.inner
        rows = _rows(sizes)
        columns = sizes.split(Shard(axis="tp", dim=1, parts=(sizes.part,)), rows=width)
        up = _of_each(scope, sizes, names.up, (inner, width))
        self._up = scope.param("experts.up", (count * inner, width), pieces=up, shard=rows)
        down = _of_each(scope, sizes, names.down, (width, inner))
        shape = (count * width, inner)
        self._down = scope.param("experts.down", shape, pieces=down, shard=columns)
        self._biases: tuple[Param, Param] | None = None
        if names.up_bias is not None and names.down_bias is not None:
            up = _of_each(scope, sizes, names.up_bias, (inner,))
            down = _of_each(scope, sizes, names.down_bias, (width,))
            self._biases = (
                scope.param(
                    "experts.up_bias", (count * inner,), pieces=up, shard=rows, init="zeros"
                ),
                scope.param(
                    "experts.down_bias",
                    (count * width,),
                    pieces=down,
                    shard=sizes.split(None, rows=width),
                    init="zeros",
                ),
            )

    def biases(self) -> Biases:
        """See LoadedExperts. The ranks' results are added up: one of them has the last bias."""
        up_bias_XI, down_bias_XE = super().biases()
        if self._biases is None:
            return up_bias_XI, down_bias_XE
        assert up_bias_XI is not None
        up, down = (bias.take().view(self._local.experts, -1) for bias in self._biases)
        up_bias_XI[:, : self._local.inner] = up
        return up_bias_XI, down if self._local.biased else torch.zeros_like(down)

    def take(self) -> ExpertWeights:
        """See LoadedExperts."""
        each = (self._local.experts, self._local.inner, self._sizes.width)
        down_XEI = self._down.take().view(each[0], each[2], each[1])
        return self.weights(self._up.take().view(each), down_XEI)


def _rows(sizes: ExpertSizes) -> Shard | None:
    """The split of [X * I, ...]."""
    rows = Shard(axis="tp", dim=0, parts=(sizes.part,) * sizes.experts)
    return sizes.split(rows, rows=sizes.inner)


def _of_each(
    scope: Scope, sizes: ExpertSizes, name: str, shape: tuple[int, ...]
) -> tuple[WeightPiece, ...]:
    """One tensor of each expert, one behind the other."""
    return tuple(
        WeightPiece(name=scope.name(name.format(i)), shape=shape, offset=i * shape[0])
        for i in range(sizes.experts)
    )
