"""Attention of a decoder with a second vector of each token, which guesses the next one
(ProphetNet, Qi et al. 2020, section 3.2): both read the cache, in which only the first ones lie;
the second ones read themselves, too. Scores have a bias by the bucket of the distance, which a
linear layer makes of the token's vector; the second ones stand one position further.

T tokens, E hidden size, H heads of this rank, D head_dim, R buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.merge_attention.op import share_beside
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import local_units

Handed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of both vectors of each token queries [T, 2, H, D] and biases of buckets [T, 2, H, R], float32;
of the second ones keys and values [T, H, D]."""


@dataclass(frozen=True, kw_only=True)
class TwoStreamSpec:
    """`attention`: of any layer, without a rope; `buckets`: R, of distances up to `max_distance`;
    `reach`: the most positions; `biases`: the linear layer."""

    attention: AttentionSpec
    buckets: int
    max_distance: int
    reach: int
    biases: str = "relative_pos_embeddings"

    def lines(self, ahead: int) -> torch.Tensor:
        """[R, reach]: 1 where a distance, and `ahead` more, is of this bucket."""
        bucket_W = buckets_of(
            torch.arange(ahead, ahead + self.reach),
            buckets=self.buckets,
            max_distance=self.max_distance,
        )
        return (torch.arange(self.buckets)[:, None] == bucket_W).float()


def buckets_of(distance_W: torch.Tensor, *, buckets: int, max_distance: int) -> torch.Tensor:
    """Half of the buckets are of one distance each, the others are as wide as logarithms say; the
    last has all from `max_distance` on."""
    exact = buckets // 2
    growth = (distance_W.float() / exact).log() / math.log(max_distance / exact)
    wide_W = (exact + growth * (buckets - exact)).clamp(max=buckets - 1)
    return torch.where(distance_W < exact, distance_W, wide_W.nan_to_num(0, 0, 0).long())


class TwoStreamAttention:
    """x_T2E -> y_T2E, in the two halves of a mixer (layers/mixer.py)."""

    def __init__(self, scope: Scope, cache: int, spec: TwoStreamSpec) -> None:
        attention = spec.attention
        scope = scope / attention.names.module
        self._scope, self._cache, self._spec = scope, cache, spec
        q, k, v = attention.parts
        self._heads = local_units(q, scope.mesh.tp)
        self._in = ColumnLinear(scope, attention.width, (q, k, v), bias=True)
        self._out = RowLinear(scope / attention.names.out, q, attention.width, bias=True)
        outputs = spec.buckets * attention.heads
        self._biases = WholeLinear(scope / spec.biases, attention.width, outputs, bias=True)
        self._write = self._attend = self._attend_ahead = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        return (self._spec.attention.form(self._scope, self._cache, self._heads),)

    def queries(self, x_T2E: torch.Tensor, batch: Batch, at_N: torch.Tensor | None) -> Handed:
        """Of the tokens `at_N` (None: all), whose first keys and values are cached."""
        qkv = self._in.project(x_T2E.flatten(0, 1)).unflatten(1, (3, self._heads, -1))
        q_T2HD, k_T2HD, v_T2HD = qkv.unflatten(0, (-1, 2)).unbind(2)
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(
            k_T2HD[:, 0].contiguous(),
            v_T2HD[:, 0].contiguous(),
            batch.kv[self._cache],
            plan.slot_T,
        )
        all_heads = (self._spec.buckets, self._spec.attention.heads)
        bias_T2RH = self._biases.project(x_T2E.flatten(0, 1)).view(-1, 2, *all_heads)
        first = self._heads * self._scope.mesh.tp.rank
        bias_T2HR = bias_T2RH[..., first : first + self._heads].transpose(2, 3).float()
        handed = q_T2HD, bias_T2HR, k_T2HD[:, 1], v_T2HD[:, 1]
        if at_N is None:
            return handed
        q, bias, k, v = (one.index_select(0, at_N) for one in handed)
        return q, bias, k, v

    def attend(self, handed: Handed, batch: Batch) -> torch.Tensor | Partial:
        """y of both vectors of each token, [2T, E]."""
        q_T2HD, bias_T2HR, k_THD, v_THD = handed
        cache, plan = batch.kv[self._cache], batch.plans[batch.group_of_layer[self._cache]]
        (q_THD, ahead_THD), (bias_THR, bias_ahead_THR) = (
            (one[:, 0].contiguous(), one[:, 1].contiguous()) for one in (q_T2HD, bias_T2HR)
        )
        y_THD = self._attend(q_THD, cache, plan, None, bias_THR)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        read_THD = self._attend_ahead(ahead_THD, cache, plan, lse_TH, bias_ahead_THR)
        own_TH = (ahead_THD.float() * k_THD.float()).sum(2) * self._spec.attention.scale
        share_TH1 = share_beside(own_TH + bias_ahead_THR[..., 0], lse_TH)
        read_THD = read_THD.float() * share_TH1 + v_THD.float() * (1.0 - share_TH1)
        both_T2HD = torch.stack((y_THD, read_THD.to(y_THD.dtype)), dim=1)
        both_TX = both_T2HD.flatten(2).flatten(0, 1)
        y = self._out.project_into(both_TX, both_TX)
        assert y is not None, "a layer with norms behind its sums does not add"
        return y

    def _finish(self) -> None:
        attention, scope, spec = self._spec.attention, self._scope, self._spec
        self._write = bind_kv_write(scope, kv_heads=self._heads, head_dim=attention.head_dim)
        problem = replace(
            attention.problem(scope, heads=self._heads, kv_heads=self._heads),
            bias_width=spec.reach,
            bias_rank=spec.buckets,
        )
        self._attend, self._attend_ahead = (
            scope.bind(ATTENTION, problem, None, spec.lines(ahead).to(scope.device))
            for ahead in (0, 1)
        )
