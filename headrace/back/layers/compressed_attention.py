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
from headrace.back.kernels.head_linear.op import OP as HEAD_LINEAR
from headrace.back.kernels.head_linear.op import HeadLinearProblem
from headrace.back.layers.compressed_entries import EntriesRead, EntryPlace, EntrySpec, turned
from headrace.back.layers.group_choice import write_rows
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT, RMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """One layer's attention, in global sizes. `out_groups`: of heads, each with a projection of its
    own to `out_rank`; `rope`: of the last dimensions of latents, queries and entries, in pairs;
    `head_norm`: heads' queries are normed; `compression`: what is read behind the window."""

    width: int
    heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    rope: RopeSpec
    eps: float
    head_norm: bool = True
    compression: EntrySpec | None = None
    name: str = "attn"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> CompressedAttentionLayer:
        """See MixerSpec."""
        return CompressedAttentionLayer(scope / self.name, cache, self, adds=adds)


class CompressedQueries(NamedTuple):
    """A step's rotated queries, where they stand, and what the choice of entries asks of them."""

    q_THD: torch.Tensor
    position_T: torch.Tensor
    beside: tuple[torch.Tensor, ...]

    def at(self, at_N: torch.Tensor | None) -> CompressedQueries:
        """Those of the tokens `at_N`, None: of all."""
        if at_N is None:
            return self
        beside = tuple(of_T.index_select(0, at_N) for of_T in self.beside)
        q_NHD, position_N = (of_T.index_select(0, at_N) for of_T in self[:2])
        return CompressedQueries(q_NHD, position_N, beside)


class CompressedAttentionLayer:
    """x_TE -> y_TE: see Mixer. Its first cache is the window's, then come those of the entries."""

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
        dim = spec.head_dim
        queries = Part("wq_b", spec.heads * dim, spec.heads)
        self._heads = local_units(queries, scope.mesh.tp)
        place = EntryPlace(width=dim, q_rank=spec.q_rank, rope=spec.rope, eps=spec.eps)
        self._entries = spec.compression and spec.compression.build(scope, cache + 1, place)
        parts = (Part("wq_a", spec.q_rank, 1), Part("wkv", dim, 1))
        pooled = () if self._entries is None else self._entries.parts
        self._down = ColumnLinear(scope, spec.width, (*parts, *pooled))
        self._q_norm = RMSNorm(scope / "q_norm", spec.q_rank, eps=spec.eps)
        self._q_up = ColumnLinear(scope, spec.q_rank, (queries,))
        self._head_norm = RMS_NO_WEIGHT.build(scope, dim, eps=spec.eps) if spec.head_norm else None
        self._kv_norm = RMSNorm(scope / "norm", dim, eps=spec.eps)
        heads = Part("attn_sink", spec.heads, spec.heads)
        shard = Shard(axis="tp", dim=0, parts=(heads,))
        self._sinks = scope.param("attn_sink", (spec.heads,), shard=shard, init="zeros")
        self._rope = Rope(scope, spec.rope)
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

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        spec = self._spec
        window = LatentForm(cache=self._cache, width=spec.head_dim, kind="window", span=spec.window)
        return (window,) if self._entries is None else (window, *self._entries.kv_forms)

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
        if self._head_norm is not None:
            q_THD = self._head_norm.norm(q_THD)
        beside: tuple[torch.Tensor, ...] = ()
        if self._entries is not None:
            beside = self._entries.queries(pooled, q_TX, angles_TR, batch)
        return CompressedQueries(turned(q_THD, angles_TR), position_T, beside).at(at_N)

    def attend_into(
        self, queries: CompressedQueries, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THD, position_T, beside = queries
        kv, plan = batch.kv[self._cache], batch.plans[batch.group_of_layer[self._cache]]
        read = EntriesRead(kv, plan, position_T[:, None])
        if self._entries is not None:
            read = self._entries.read(beside, position_T, batch)
        y_THD = self._attend(q_THD, kv, plan, position_T, *read)
        y_THD = turned(y_THD, self._rope.table_PR[position_T], back=True)
        y_TGX = y_THD.flatten(1).unflatten(1, (self._groups, -1))
        inner_TGX = y_TGX.new_empty((*y_TGX.shape[:2], self._spec.out_rank))
        self._out_heads(y_TGX, inner_TGX)
        return self._out.project_into(inner_TGX.flatten(1), residual_TE)

    def _finish(self) -> None:
        spec, scope, entries = self._spec, self._scope, self._entries
        facts = {"device": scope.kind, "dtype": scope.dtype}
        problem = CompressedProblem(
            **facts,
            heads=self._heads,
            head_dim=spec.head_dim,
            window=spec.window,
            group=0 if entries is None else entries.group,
            top_k=0 if entries is None else entries.top_groups,
            block_tokens=scope.block_tokens,
            scale=spec.head_dim**-0.5,
        )
        self._attend = scope.bind(COMPRESSED_ATTENTION, problem, self._sinks.take().float())
        weight_GOI = self._out_down.take().unflatten(0, (self._groups, spec.out_rank))
        out = HeadLinearProblem(
            **facts, heads=self._groups, inputs=weight_GOI.shape[2], outputs=spec.out_rank
        )
        self._out_heads = scope.bind(HEAD_LINEAR, out, weight_GOI)
