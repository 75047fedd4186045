"""Attention over the cache of a layer before: it projects queries alone and writes nothing (Sun et
al. 2024, "You only cache once"; Gemma 3n and 4).

T tokens, E hidden size, H query heads, K KV heads, D head_dim; H and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.decode_context import split_context
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import local_units


@dataclass(frozen=True, kw_only=True)
class SharedAttentionSpec:
    """`attention`: as that of any layer, with a rope and without what only some families have
    (sinks, gates, clips, values of another size). `cache`: the one that it reads, which an
    attention of the same KV heads, head_dim and window writes."""

    attention: AttentionSpec
    cache: int

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> SharedAttention:
        """See MixerSpec."""
        return SharedAttention(scope, self, norm=norm, adds=adds)


class SharedAttention:
    """x_TE -> y_TE: see Mixer and SharedAttentionSpec."""

    probed = False
    kv_forms: tuple[CacheForm, ...] = ()

    def __init__(
        self, scope: Scope, spec: SharedAttentionSpec, *, norm: RMSNorm | None, adds: bool
    ) -> None:
        self._spec, self._cache = spec.attention, spec.cache
        names, scope = self._spec.names, scope / self._spec.names.module
        windowed = self._spec.cache_kind != "full"
        scope = scope.of_cache(spec.cache, windowed=windowed)
        q, k, *_ = self._spec.parts
        self._scope = scope
        self._context = split_context(scope, kv_heads=self._spec.kv_heads, whole=windowed)
        self._heads, self._kv_heads = (local_units(part, scope.mesh.tp) for part in (q, k))
        self._query = ColumnLinear(
            scope, self._spec.width, (q,), bias=self._spec.qkv_bias, norm=norm
        )
        self._out = RowLinear(
            scope / names.out, q, self._spec.width, bias=self._spec.out_bias, adds=adds
        )
        qk_norm, rope = self._spec.qk_norm, self._spec.rope
        assert rope is not None, "no rope"
        self._norm = None if qk_norm is None else qk_norm.build(scope / qk_norm.names[0], q)
        self._rope = Rope(scope, rope)
        self._attend = not_loaded
        scope.on_finish(self._finish)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._query.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD, normed and rotated."""
        q_THD = self._query.project(x_TE).unflatten(1, (self._heads, -1))
        if self._norm is not None:
            q_THD = self._norm.norm(q_THD)
        self._rope.rotate(q_THD, q_THD[:, :0], batch.positions_T, self._rope.table_PR)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan)
        return self._out.project_into(y_THD.flatten(1), residual_TE)

    def _finish(self) -> None:
        problem = self._spec.problem(self._scope, heads=self._heads, kv_heads=self._kv_heads)
        if self._context is not None:
            self._attend = self._context.of_heads(self._scope, problem)
            return
        self._attend = bind_attention(self._scope, problem)
