"""Attention whose scores have a bias by distance that follows from the state of the query's token,
and whose keys and values are convolved with those before them (Inkling; transformers 5.23,
modeling_inkling).

A projection gives each query and head R numbers, which mix R lines of biases, one for each of the
last W positions; farther ones have none. T tokens, E hidden size, H query heads, K KV heads, D
head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units

Biased = tuple[torch.Tensor, torch.Tensor]
"""Queries [T, H, D], and their states [T, H, R] in float32."""


@dataclass(frozen=True, kw_only=True)
class StateBiasedSpec:
    """`attention`: of any layer, with norms of each head's queries and keys, without a rope and
    what only some families have. `rank`: R; `extent`: W; `taps`: of the convolutions; `states`,
    `lines`: the names of the projection and of the biases."""

    attention: AttentionSpec
    rank: int
    extent: int
    taps: int
    states: str = "r_proj"
    lines: str = "rel_logits_proj.proj"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> StateBiasedAttention:
        """See MixerSpec."""
        return StateBiasedAttention(scope, cache, self, norm=norm, adds=adds)


class StateBiasedAttention:
    """x_TE -> y_TE: see Mixer and the file. Its second cache is that of the convolutions."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: StateBiasedSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        attention = spec.attention
        scope = scope / attention.names.module
        scope = scope.of_cache(cache, windowed=attention.window is not None)
        assert attention.rope is None and attention.qk_norm is not None, spec
        self._scope, self._cache, self._spec = scope, cache, spec
        q, k, v = attention.parts
        states = Part(spec.states, attention.heads * spec.rank, attention.heads)
        self._heads, self._kv_heads = (local_units(part, scope.mesh.tp) for part in (q, k))
        self._in = ColumnLinear(scope, attention.width, (q, k, v, states), norm=norm)
        self._out = RowLinear(scope / attention.names.out, q, attention.width, adds=adds)
        self._conv = ShortConv(
            scope,
            cache + 1,
            (k, v),
            taps=spec.taps,
            activation="",
            separate=("k_sconv", "v_sconv"),
            adds_input=True,
        )
        self._norms = [
            attention.qk_norm.build(scope / name, part)
            for name, part in zip(attention.qk_norm.names, (q, k), strict=True)
        ]
        self._lines = scope.param(spec.lines, (spec.rank, spec.extent), dtype=torch.float32)
        self._growth = attention.query_scale and attention.query_scale.build(scope, attention.heads)
        self._write = self._attend = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        attention = self._spec.attention
        heads = attention.form(self._scope, self._cache, self._kv_heads)
        return heads, self._conv.form

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None) -> Biased:
        """Of the tokens `at_N` (None: all), whose keys and values are cached."""
        q_size, k_size, v_size, r_size = self._in.sizes
        q_TX, kv_TC, r_TX = self._in.project(x_TE).split_with_sizes(
            (q_size, k_size + v_size, r_size), dim=1
        )
        kv_TC = self._conv.apply(kv_TC, batch, scan_rows(batch, self._cache + 1))
        k_TKD, v_TKD = (
            part_TX.unflatten(1, (self._kv_heads, -1))
            for part_TX in kv_TC.split_with_sizes((k_size, v_size), dim=1)
        )
        of_q, of_k = self._norms
        q_THD, k_TKD = of_q.norm(q_TX.unflatten(1, (self._heads, -1))), of_k.norm(k_TKD)
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        states_THR = r_TX.unflatten(1, (self._heads, -1)).float()
        if self._growth is not None:
            growth_T11 = self._growth.factors(batch.positions_T)
            q_THD, states_THR = q_THD * growth_T11, states_THR * growth_T11
        if at_N is None:
            return q_THD, states_THR.contiguous()
        return q_THD.index_select(0, at_N), states_THR.index_select(0, at_N)

    def attend_into(
        self, biased: Biased, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THD, states_THR = biased
        plan = batch.plans[batch.group_of_layer[self._cache]]
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan, None, states_THR)
        return self._out.project_into(y_THD.flatten(1), residual_TE)

    def _finish(self) -> None:
        attention, scope, spec = self._spec.attention, self._scope, self._spec
        self._write = bind_kv_write(scope, kv_heads=self._kv_heads, head_dim=attention.head_dim)
        problem = replace(
            attention.problem(scope, heads=self._heads, kv_heads=self._kv_heads),
            bias_width=spec.extent,
            bias_rank=spec.rank,
        )
        self._attend = scope.bind(ATTENTION, problem, None, self._lines.take())
