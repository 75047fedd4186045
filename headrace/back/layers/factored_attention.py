"""Attention whose queries come out of two matrices with a norm between them, and whose heads share
one key and one value (Step team 2025, "multi-matrix factorization attention"; Step-3).

T tokens, E hidden size, R the rank of queries, H query heads of this rank, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attended import Attended
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class FactoredAttentionSpec:
    """`attention`: of any layer with a rope, without what only some families have; `rank`: R;
    `norm`, `up`: what lies between the two matrices, and the second."""

    attention: AttentionSpec
    rank: int
    eps: float
    norm: str = "inter_norm"
    up: str = "wq"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> FactoredAttention:
        """See MixerSpec."""
        return FactoredAttention(scope, cache, self, norm=norm, adds=adds)


class FactoredAttention(Attended):
    """x_TE -> y_TE: see Mixer and the file."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: FactoredAttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        attention = spec.attention
        scope = (scope / attention.names.module).of_cache(cache)
        assert attention.rope is not None, spec
        self._scope, self._cache, self._spec = scope, cache, attention
        self._value_dim = attention.head_dim
        query, key, value = attention.parts
        self._heads, self._kv_heads = (local_units(part, scope.mesh.tp) for part in (query, key))
        # Each rank has all of what the second matrix reads.
        first = Part(query.name, spec.rank, 1)
        self._in = ColumnLinear(scope, attention.width, (first, key, value), norm=norm)
        self._norm = RMSNorm(scope / spec.norm, spec.rank, eps=spec.eps)
        up = Part(spec.up, query.size, query.units)
        self._up = ColumnLinear(scope, spec.rank, (up,))
        self._out = RowLinear(scope / attention.names.out, query, attention.width, adds=adds)
        self._rope = Rope(scope, attention.rope)
        self._write = self._attend = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        return (self._spec.form(self._scope, self._cache, self._kv_heads),)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD, rotated, of the tokens `at_N` (None: all), whose keys and values are cached."""
        q_TR, k_TX, v_TX = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        q_TX = self._up.project(self._norm.norm(q_TR.contiguous()))
        q_THD = q_TX.unflatten(1, (self._heads, -1))
        k_TKD, v_TKD = (x.unflatten(1, (self._kv_heads, -1)) for x in (k_TX, v_TX))
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        self._write = bind_kv_write(scope, kv_heads=self._kv_heads, head_dim=spec.head_dim)
        problem = spec.problem(scope, heads=self._heads, kv_heads=self._kv_heads)
        self._attend = bind_attention(scope, problem)
