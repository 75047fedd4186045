"""What attention over compressed caches reads behind its window (DeepSeek V4, section 2.3): entries
of groups of positions, all of them or those that an indexer over the same groups chooses.

T tokens, R dimensions that are rotated, X rank of the queries' bottleneck, J heads of the indexer,
I dimensions of one, K groups chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.group_select.op import GroupSelect
from headrace.back.layers.group_choice import GroupPool, PoolSpec, bind_select
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part


class EntriesRead(NamedTuple):
    """What a step's queries read: a cache, its plan, and groups_TK (op compressed_attention)."""

    entries: torch.Tensor
    plan: AttentionPlan
    groups_TK: torch.Tensor


class EntryBranch(Protocol):
    """What an attention asks of its entries, in the two halves of a mixer. `parts`: of the one GEMM
    of x; `group`: positions of an entry; `top_groups`: those that a query reads at most, 0: all."""

    parts: tuple[Part, ...]
    group: int
    top_groups: int

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Its own caches."""
        ...

    def queries(
        self,
        projected: Sequence[torch.Tensor],
        q_TX: torch.Tensor,
        angles_TR: torch.Tensor,
        batch: Batch,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the step's entries; what its choice asks of each token, a row a token.
        `projected`: what the GEMM gave for `parts`; `q_TX`: the queries' bottleneck."""
        ...

    def read(
        self, handed: tuple[torch.Tensor, ...], position_T: torch.Tensor, batch: Batch
    ) -> EntriesRead:
        """What the queries read of which `handed` has a row each."""
        ...


class EntrySpec(Protocol):
    """Entries as data of an attention."""

    def build(self, scope: Scope, cache: int, place: EntryPlace) -> EntryBranch:
        """`scope` is the attention's, `cache` the id of the first of its caches."""
        ...


@dataclass(frozen=True, kw_only=True)
class EntryPlace:
    """The sizes of the attention around: `width` of latents, `q_rank` of the queries' bottleneck,
    `rope`: of the last dimensions of both."""

    width: int
    q_rank: int
    rope: RopeSpec
    eps: float


@dataclass(frozen=True, kw_only=True)
class GroupIndexSpec:
    """The indexer over entries of its own. `top_groups`: K."""

    heads: int
    dim: int
    top_groups: int


@dataclass(frozen=True, kw_only=True)
class CompressionSpec:
    """Entries of a layer's own. `series`: see op group_write; `index`: chooses among the entries,
    None: all are read."""

    group: int
    series: int
    index: GroupIndexSpec | None = None

    def build(self, scope: Scope, cache: int, place: EntryPlace) -> OwnEntries:
        """See EntrySpec."""
        return OwnEntries(scope, cache, self, place)


class OwnEntries:
    """See EntryBranch and CompressionSpec."""

    def __init__(self, scope: Scope, cache: int, spec: CompressionSpec, place: EntryPlace) -> None:
        self.group = spec.group
        self.top_groups = 0 if spec.index is None else spec.index.top_groups
        names = ("compressor.wkv", "compressor.wgate")
        self.parts = tuple(Part(name, spec.series * place.width, 1) for name in names)
        self._pool = CompressedPool(scope, cache, spec, place, place.width).pool
        self._index = None
        if spec.index is not None:
            self._index = GroupIndex(scope / "indexer", cache + 2, spec, spec.index, place)
            keys = (Part(f"indexer.{name}", spec.series * spec.index.dim, 1) for name in names)
            self.parts += (*keys, Part("indexer.weights_proj", spec.index.heads, 1))

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of its entries, then of the indexer's."""
        forms = self._pool.kv_forms
        return forms if self._index is None else forms + self._index.pool.kv_forms

    def queries(
        self,
        projected: Sequence[torch.Tensor],
        q_TX: torch.Tensor,
        angles_TR: torch.Tensor,
        batch: Batch,
    ) -> tuple[torch.Tensor, ...]:
        """See EntryBranch: rotated queries and their heads' weights."""
        self._pool.write(torch.cat(tuple(projected[:2]), dim=1), batch)
        if self._index is None:
            return ()
        self._index.pool.write(torch.cat(tuple(projected[2:4]), dim=1), batch)
        return self._index.queries(q_TX, angles_TR), projected[4]

    def read(
        self, handed: tuple[torch.Tensor, ...], position_T: torch.Tensor, batch: Batch
    ) -> EntriesRead:
        """See EntryBranch."""
        at = self._pool.entries
        groups_TK = (
            position_T[:, None] if self._index is None else self._index.choose(*handed, batch)
        )
        return EntriesRead(batch.kv[at], batch.plans[batch.group_of_layer[at]], groups_TK)


class CompressedPool:
    """Entries with gates, positions' biases, a norm and a rotation of their last dimensions.
    `scope` is that of the module above "compressor"."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        over: CompressionSpec,
        place: EntryPlace,
        width: int,
    ) -> None:
        pool = PoolSpec(
            width=width,
            group=over.group,
            series=over.series,
            gated=True,
            eps=place.eps,
            rope=place.rope,
            offset=width - place.rope.rotary_dim,
        )
        self.pool = GroupPool(scope, cache, pool)
        at = scope / "compressor"
        self._bias = at.param(
            "ape", (over.group, over.series * width), dtype=torch.float32, init="zeros"
        )
        self._norm = at.param("norm.weight", (width,), init="ones")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.pool.finish(self._bias.take().float(), self._norm.take().float())


class GroupIndex:
    """Scores the entries of its own of all whole groups. `cache`: the id of their first cache."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        over: CompressionSpec,
        index: GroupIndexSpec,
        place: EntryPlace,
    ) -> None:
        self._scope, self._over, self._index = scope, over, index
        self.pool = CompressedPool(scope, cache, over, place, index.dim).pool
        self._up = ColumnLinear(scope, place.q_rank, (Part("wq_b", index.heads * index.dim, 1),))
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    def queries(self, q_TX: torch.Tensor, angles_TR: torch.Tensor) -> torch.Tensor:
        """Rotated, of the queries' bottleneck."""
        return turned(self._up.project(q_TX).unflatten(1, (self._index.heads, -1)), angles_TR)

    def choose(self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, batch: Batch) -> torch.Tensor:
        """groups_TK."""
        at = self.pool.entries
        plan = batch.plans[batch.group_of_layer[at]]
        return self._select(q_TJI, weight_TJ, batch.kv[at], plan)[:, 0]

    def _finish(self) -> None:
        index, over = self._index, self._over
        self._select = bind_select(
            self._scope,
            heads=index.heads,
            dim=index.dim,
            group=over.group,
            top_k=index.top_groups,
        )


def turned(x_THD: torch.Tensor, angles_TR: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """The last R dimensions rotated in pairs by cosines, then sines; `back`: the other way."""
    still = x_THD.shape[2] - angles_TR.shape[1]
    cos_T1F, sin_T1F = angles_TR[:, None].chunk(2, dim=2)
    a_THF, b_THF = x_THD[..., still:].float().unflatten(2, (-1, 2)).unbind(3)
    if back:
        sin_T1F = -sin_T1F
    pairs = (a_THF * cos_T1F - b_THF * sin_T1F, b_THF * cos_T1F + a_THF * sin_T1F)
    rotated_THR = torch.stack(pairs, dim=3).flatten(2).to(x_THD.dtype)
    return torch.cat((x_THD[..., :still], rotated_THR), dim=2)
