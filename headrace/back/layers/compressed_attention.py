"""Attention over compressed caches (DeepSeek V4, section 2.3): every head reads one latent of each
position, as key and as value, in a window, and behind it entries of groups of positions, all of
them or those that an indexer over the same groups chooses.

Latents and entries are rotated in their last dimensions; what heads give is turned back. It is
projected in groups of heads of their own, then together. T tokens, N those that go on, E hidden
size, H heads, D head_dim, R of it rotated, J heads of the indexer, I dimensions of one, K groups
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.compressed_attention.op import OP as COMPRESSED_ATTENTION
from headrace.back.kernels.compressed_attention.op import CompressedProblem
from headrace.back.kernels.group_select.op import GroupSelect
from headrace.back.kernels.head_linear.op import OP as HEAD_LINEAR
from headrace.back.kernels.head_linear.op import HeadLinearProblem
from headrace.back.layers.group_choice import GroupPool, PoolSpec, bind_select, write_rows
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT, RMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GroupIndexSpec:
    """The indexer over entries of its own. `top_groups`: K."""

    heads: int
    dim: int
    top_groups: int


@dataclass(frozen=True, kw_only=True)
class CompressionSpec:
    """`series`: see op group_write; `index`: chooses among the entries, None: all are read."""

    group: int
    series: int
    index: GroupIndexSpec | None = None


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """One layer's attention, in global sizes. `out_groups`: of heads, each with a projection of its
    own to `out_rank`; `rope`: of the last dimensions of latents, queries and entries, in pairs."""

    width: int
    heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    rope: RopeSpec
    eps: float
    compression: CompressionSpec | None = None
    name: str = "attn"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> CompressedAttentionLayer:
        """See MixerSpec."""
        return CompressedAttentionLayer(scope / self.name, cache, self, adds=adds)


class CompressedQueries(NamedTuple):
    """A step's rotated queries, where they stand, and the indexer's queries and weights."""

    q_THD: torch.Tensor
    position_T: torch.Tensor
    index_TJI: torch.Tensor
    weight_TJ: torch.Tensor

    def at(self, at_N: torch.Tensor | None) -> CompressedQueries:
        """Those of the tokens `at_N`, None: of all."""
        if at_N is None:
            return self
        return CompressedQueries(*(of_T.index_select(0, at_N) for of_T in self))


class CompressedAttentionLayer:
    """x_TE -> y_TE: see Mixer. Its first cache is the window's, then come those of the entries,
    then those of the indexer's."""

    probed = False
    norms = False

    def __init__(
        self, scope: Scope, cache: int, spec: CompressedAttentionSpec, *, adds: bool
    ) -> None:
        if scope.kv_quantized:
            raise ConfigError(
                f"--kv-dtype {scope.kv_quantized}: latents are kept in the model's dtype; "
                "use auto with this model",
                field="kv_dtype",
            )
        self._scope, self._cache, self._spec = scope, cache, spec
        dim, over = spec.head_dim, spec.compression
        queries = Part("wq_b", spec.heads * dim, spec.heads)
        self._heads = local_units(queries, scope.mesh.tp)
        self._down = ColumnLinear(scope, spec.width, self._down_parts())
        self._q_norm = RMSNorm(scope / "q_norm", spec.q_rank, eps=spec.eps)
        self._q_up = ColumnLinear(scope, spec.q_rank, (queries,))
        self._head_norm = RMS_NO_WEIGHT.build(scope, dim, eps=spec.eps)
        self._kv_norm = RMSNorm(scope / "norm", dim, eps=spec.eps)
        heads = Part("attn_sink", spec.heads, spec.heads)
        shard = Shard(axis="tp", dim=0, parts=(heads,))
        self._sinks = scope.param("attn_sink", (spec.heads,), shard=shard, init="zeros")
        self._rope = Rope(scope, spec.rope)
        self._pool = None if over is None else CompressedPool(scope, cache + 1, spec, over, dim)
        self._index = None
        if over is not None and over.index is not None:
            self._index = GroupIndex(scope / "indexer", cache + 3, spec, over, over.index)
        inner = Part("wo_a", spec.out_groups * spec.out_rank, spec.out_groups)
        self._groups = local_units(inner, scope.mesh.tp)
        self._out_down = scope.param(
            "wo_a.weight",
            (inner.size, spec.heads * dim // spec.out_groups),
            shard=Shard(axis="tp", dim=0, parts=(inner,)),
        )
        self._out = RowLinear(scope / "wo_b", inner, spec.width, adds=adds)
        self._attend = self._out_heads = not_loaded
        scope.on_finish(self._finish)

    def _down_parts(self) -> tuple[Part, ...]:
        """Of the one GEMM of x: the queries' bottleneck, latents, and what is pooled."""
        spec, over = self._spec, self._spec.compression
        parts = [Part("wq_a", spec.q_rank, 1), Part("wkv", spec.head_dim, 1)]
        if over is None:
            return tuple(parts)
        names = ("compressor.wkv", "compressor.wgate")
        parts += [Part(name, over.series * spec.head_dim, 1) for name in names]
        if over.index is not None:
            parts += [Part(f"indexer.{name}", over.series * over.index.dim, 1) for name in names]
            parts += [Part("indexer.weights_proj", over.index.heads, 1)]
        return tuple(parts)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        spec = self._spec
        window = LatentForm(cache=self._cache, width=spec.head_dim, kind="window", span=spec.window)
        forms: tuple[CacheForm, ...] = (window,)
        if self._pool is not None:
            forms += self._pool.pool.kv_forms
        return forms if self._index is None else forms + self._index.compressed.pool.kv_forms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> CompressedQueries:
        """Those of the tokens `at_N`, None: of all, whose latents are in the cache."""
        spec, position_T = self._spec, batch.positions_T
        q_TX, kv_TD, *pooled = self._down.project(x_TE).split_with_sizes(self._down.sizes, dim=1)
        angles_TR = self._rope.table_PR[position_T]
        plan = batch.plans[batch.group_of_layer[self._cache]]
        latent_T1D = turned(self._kv_norm.norm(kv_TD)[:, None], angles_TR)
        write_rows(batch.kv[self._cache], latent_T1D[:, 0], plan.slot_T)
        q_TX = self._q_norm.norm(q_TX)
        q_THD = self._q_up.project(q_TX).unflatten(1, (self._heads, spec.head_dim))
        q_THD = turned(self._head_norm.norm(q_THD), angles_TR)
        if self._pool is not None:
            self._pool.pool.write(torch.cat(pooled[:2], dim=1), batch)
        index_TJI = weight_TJ = q_THD[:, :0, 0]
        if self._index is not None:
            self._index.compressed.pool.write(torch.cat(pooled[2:4], dim=1), batch)
            index_TJI, weight_TJ = self._index.queries(q_TX, angles_TR), pooled[4]
        return CompressedQueries(q_THD, position_T, index_TJI, weight_TJ).at(at_N)

    def attend_into(
        self, queries: CompressedQueries, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THD, position_T, index_TJI, weight_TJ = queries
        plans, kv = batch.plans, batch.kv[self._cache]
        plan = entry_plan = plans[batch.group_of_layer[self._cache]]
        entries, groups_TK = kv, position_T[:, None]
        if self._pool is not None:
            at = self._pool.pool.entries
            entries, entry_plan = batch.kv[at], plans[batch.group_of_layer[at]]
        if self._index is not None:
            groups_TK = self._index.choose(index_TJI, weight_TJ, batch)
        y_THD = self._attend(q_THD, kv, plan, position_T, entries, entry_plan, groups_TK)
        y_THD = turned(y_THD, self._rope.table_PR[position_T], back=True)
        y_TGX = y_THD.flatten(1).unflatten(1, (self._groups, -1))
        inner_TGX = y_TGX.new_empty((*y_TGX.shape[:2], self._spec.out_rank))
        self._out_heads(y_TGX, inner_TGX)
        return self._out.project_into(inner_TGX.flatten(1), residual_TE)

    def _finish(self) -> None:
        spec, scope, over = self._spec, self._scope, self._spec.compression
        facts = {"device": scope.kind, "dtype": scope.dtype}
        problem = CompressedProblem(
            **facts,
            heads=self._heads,
            head_dim=spec.head_dim,
            window=spec.window,
            group=over.group if over is not None else 0,
            top_k=over.index.top_groups if over is not None and over.index is not None else 0,
            block_tokens=scope.block_tokens,
            scale=spec.head_dim**-0.5,
        )
        self._attend = scope.bind(COMPRESSED_ATTENTION, problem, self._sinks.take().float())
        weight_GOI = self._out_down.take().unflatten(0, (self._groups, spec.out_rank))
        out = HeadLinearProblem(
            **facts, heads=self._groups, inputs=weight_GOI.shape[2], outputs=spec.out_rank
        )
        self._out_heads = scope.bind(HEAD_LINEAR, out, weight_GOI)


class CompressedPool:
    """Entries with gates, positions' biases, a norm and a rotation of their last dimensions.
    `scope` is that of the module above "compressor"."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: CompressedAttentionSpec,
        over: CompressionSpec,
        width: int,
    ) -> None:
        pool = PoolSpec(
            width=width,
            group=over.group,
            series=over.series,
            gated=True,
            eps=spec.eps,
            rope=spec.rope,
            offset=width - spec.rope.rotary_dim,
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
        spec: CompressedAttentionSpec,
        over: CompressionSpec,
        index: GroupIndexSpec,
    ) -> None:
        self._scope, self._over, self._index = scope, over, index
        self.compressed = CompressedPool(scope, cache, spec, over, index.dim)
        self._up = ColumnLinear(scope, spec.q_rank, (Part("wq_b", index.heads * index.dim, 1),))
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    def queries(self, q_TX: torch.Tensor, angles_TR: torch.Tensor) -> torch.Tensor:
        """Rotated, of the queries' bottleneck."""
        return turned(self._up.project(q_TX).unflatten(1, (self._index.heads, -1)), angles_TR)

    def choose(self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, batch: Batch) -> torch.Tensor:
        """groups_TK."""
        at = self.compressed.pool.entries
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
