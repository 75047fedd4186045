"""Indexers of groups of positions: they score what is pooled of the keys of each whole group, and
attention reads the positions of the best ones and of those behind the last whole group.

Each is small and not split: every rank holds all of it. T tokens, N those that go on, E hidden
size, X rank of the queries' down-projection, J heads of the indexer, I dimensions of one, G
positions of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.group_select.op import GroupSelect
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.group_choice import (
    GroupPool,
    PoolSpec,
    bind_select,
    check_group,
    positions_of,
    write_rows,
)
from headrace.back.layers.indexer import PositionChoice, Selection, SharedChoice
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.norm import LAYER, RMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part


class GroupQueries(NamedTuple):
    """A step's queries, their heads' weights, and where the queries stand."""

    q_TJI: torch.Tensor
    weight_TJ: torch.Tensor
    position_T: torch.Tensor

    def at(self, at_N: torch.Tensor | None) -> GroupQueries:
        """Those of the tokens `at_N`, None: of all."""
        if at_N is None:
            return self
        return GroupQueries(*(of_T.index_select(0, at_N) for of_T in self))


@dataclass(frozen=True, kw_only=True)
class GatedGroupSpec:
    """Keys pooled by gates of their own, as GLM-5 has them. `top_groups`: groups chosen; `tail`:
    positions behind the last whole group are read, too; `selection`, `shared`: see IndexerSpec;
    `eps`: of the norm of the keys."""

    heads: int
    dim: int
    group: int
    top_groups: int
    eps: float
    tail: bool = True
    selection: Selection | None = None
    shared: bool = False
    lists: int = 1

    @property
    def top_k(self) -> int:
        """Positions of a list, at most."""
        return self.top_groups * self.group + (self.group - 1 if self.tail else 0)

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """See IndexerSpec."""
        if self.shared:
            assert self.selection is not None, "a shared choice has a place"
            return SharedChoice(self.selection)
        return GatedGroups(scope, cache, self, width=width, q_rank=q_rank)


class GatedGroups:
    """See PositionChoice and GatedGroupSpec."""

    def __init__(
        self, scope: Scope, cache: int, spec: GatedGroupSpec, *, width: int, q_rank: int
    ) -> None:
        self._scope, self._spec = scope, spec
        self._query = ColumnLinear(scope, q_rank, (Part("wq_b", spec.heads * spec.dim, 1),))
        self._key = ColumnLinear(scope, width, (Part("wk", spec.dim, 1),))
        self._norm = LAYER.build(scope / "k_norm", spec.dim, eps=spec.eps)
        self._weight = ColumnLinear(scope, width, (Part("weights_proj", spec.heads, 1),))
        self._gate = scope.param("index_kpool_compress_gate", (spec.dim, width))
        self._bias = scope.param("index_kpool_compress_ape", (spec.group, spec.dim))
        self._gate_of: Linear = not_loaded
        pool = PoolSpec(width=spec.dim, group=spec.group, gated=True)
        self._pool = GroupPool(scope, cache, pool)
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of its keys and their gates, and of groups."""
        return self._pool.kv_forms

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> GroupQueries:
        """See PositionChoice."""
        key_TI = self._norm.norm(self._key.project(x_TE))
        self._pool.write(torch.cat((key_TI, self._gate_of(x_TE)), dim=1), batch)
        q_TJI = self._query.project(q_TX).unflatten(1, (self._spec.heads, self._spec.dim))
        return GroupQueries(q_TJI, self._weight.project(x_TE), batch.positions_T).at(at_N)

    def choose(self, queries: GroupQueries, batch: Batch) -> torch.Tensor:
        """See PositionChoice."""
        cache = self._pool.entries
        plan = batch.plans[batch.group_of_layer[cache]]
        groups_T1K = self._select(queries.q_TJI, queries.weight_TJ, batch.kv[cache], plan)
        chosen_T1S = positions_of(
            groups_T1K, queries.position_T, group=self._spec.group, tail=self._spec.tail
        )
        if self._spec.selection is not None:
            self._spec.selection.chosen_TK = chosen_T1S
        return chosen_T1S

    def _finish(self) -> None:
        spec = self._spec
        self._gate_of = bind_linear(self._scope, self._gate.take(), None)
        self._pool.finish(self._bias.take().float(), None)
        self._select = bind_select(
            self._scope, heads=spec.heads, dim=spec.dim, group=spec.group, top_k=spec.top_groups
        )


@dataclass(frozen=True, kw_only=True)
class MeanGroupSpec:
    """Means of keys, normed and rotated where their group begins, as Qwen 4 has them. See
    GatedGroupSpec."""

    heads: int
    dim: int
    group: int
    top_groups: int
    eps: float
    rope: RopeSpec
    lists: int = 1

    @property
    def top_k(self) -> int:
        """Positions of a list, at most."""
        return (self.top_groups + 1) * self.group - 1

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """See IndexerSpec."""
        return MeanGroups(scope, cache, self, width=width)


class MeanGroups:
    """See PositionChoice and MeanGroupSpec."""

    def __init__(self, scope: Scope, cache: int, spec: MeanGroupSpec, *, width: int) -> None:
        self._scope, self._spec = scope, spec
        both = Part("index_qk_proj", (spec.heads + 1) * spec.dim, 1)
        self._both = ColumnLinear(scope, width, (both,))
        self._query_norm, self._key_norm = (
            RMSNorm(scope / name, spec.dim, eps=spec.eps, offset=1.0)
            for name in ("q_layernorm", "k_layernorm")
        )
        self._rope = Rope(scope, spec.rope)
        pool = PoolSpec(width=spec.dim, group=spec.group, eps=spec.eps, rope=spec.rope)
        self._pool = GroupPool(scope, cache, pool)
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of its keys, and of groups."""
        return self._pool.kv_forms

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> GroupQueries:
        """See PositionChoice."""
        both_TJI = self._both.project(x_TE).unflatten(1, (-1, self._spec.dim))
        q_TJI, key_TI = both_TJI[:, :-1].contiguous(), both_TJI[:, -1]
        self._pool.write(key_TI, batch)
        q_TJI = self._query_norm.norm(q_TJI)
        self._rope.rotate(q_TJI, q_TJI[:, :0], batch.positions_T, self._rope.table_PR)
        weight_TJ = q_TJI.new_ones(q_TJI.shape[:2])
        return GroupQueries(q_TJI, weight_TJ, batch.positions_T).at(at_N)

    def choose(self, queries: GroupQueries, batch: Batch) -> torch.Tensor:
        """See PositionChoice."""
        cache = self._pool.entries
        plan = batch.plans[batch.group_of_layer[cache]]
        groups_T1K = self._select(queries.q_TJI, queries.weight_TJ, batch.kv[cache], plan)
        return positions_of(groups_T1K, queries.position_T, group=self._spec.group, tail=True)

    def _finish(self) -> None:
        spec = self._spec
        self._pool.finish(None, self._key_norm.weight_E)
        self._select = bind_select(
            self._scope, heads=spec.heads, dim=spec.dim, group=spec.group, top_k=spec.top_groups
        )


@dataclass(frozen=True, kw_only=True)
class BestKeySpec:
    """Groups are scored by their best key, for each head of the indexer alone, which is one for
    each KV head (MiniMax-M3). `local`: groups up to the query's own that are always read."""

    heads: int
    dim: int
    group: int
    top_groups: int
    local: int
    eps: float
    rope: RopeSpec

    @property
    def lists(self) -> int:
        """One for each KV head."""
        return self.heads

    @property
    def top_k(self) -> int:
        """Positions of a list, at most."""
        return self.top_groups * self.group

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """See IndexerSpec."""
        return BestKeys(scope, cache, self, width=width)


class BestKeys:
    """See PositionChoice and BestKeySpec."""

    def __init__(self, scope: Scope, cache: int, spec: BestKeySpec, *, width: int) -> None:
        check_group(scope, spec.group)
        self._scope, self._cache, self._spec = scope, cache, spec
        self._both = ColumnLinear(
            scope, width, (Part("q_proj", spec.heads * spec.dim, 1), Part("k_proj", spec.dim, 1))
        )
        self._query_norm, self._key_norm = (
            RMSNorm(scope / name, spec.dim, eps=spec.eps, offset=1.0)
            for name in ("q_norm", "k_norm")
        )
        self._rope = Rope(scope, spec.rope)
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of its keys."""
        return (LatentForm(cache=self._cache, width=self._spec.dim),)

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> GroupQueries:
        """See PositionChoice."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        both_TX = self._both.project(x_TE)
        q_TX, key_TX = both_TX.split_with_sizes(self._both.sizes, dim=1)
        q_TJI = self._query_norm.norm(q_TX.unflatten(1, (-1, self._spec.dim)))
        key_T1I = self._key_norm.norm(key_TX[:, None])
        self._rope.rotate(q_TJI, key_T1I, batch.positions_T, self._rope.table_PR)
        write_rows(batch.kv[self._cache], key_T1I[:, 0], plan.slot_T)
        weight_TJ = q_TJI.new_ones(q_TJI.shape[:2])
        return GroupQueries(q_TJI, weight_TJ, batch.positions_T).at(at_N)

    def choose(self, queries: GroupQueries, batch: Batch) -> torch.Tensor:
        """See PositionChoice."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        keys = batch.kv[self._cache]
        groups_TGK = self._select(queries.q_TJI, queries.weight_TJ, keys, plan)
        return positions_of(groups_TGK, queries.position_T, group=self._spec.group, tail=False)

    def _finish(self) -> None:
        spec = self._spec
        self._select = bind_select(
            self._scope,
            heads=spec.heads,
            dim=spec.dim,
            group=spec.group,
            top_k=spec.top_groups,
            local=spec.local,
        )
