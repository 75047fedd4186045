"""Attention of a layer that runs several times over each token: the first time over what that time
has cached, each later time over that again and over a window of its own cache, mixed by a gate for
each head (IQuest-Coder's loop, 2026; names of its published checkpoint).

T tokens, E hidden size, H query heads, K KV heads, D head_dim; H and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attended import chosen
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units

Handed = tuple[torch.Tensor, torch.Tensor | None]
"""q_THD, and the gates [T, H, 1] of later times."""


@dataclass(frozen=True, kw_only=True)
class LoopedAttentionSpec:
    """`attention`: as that of any layer, with a rope and without what only some families have.
    `layers` of the model: so many caches lie between two times of one. `window` of later times;
    `gates`: where the checkpoint has their weight [H, D] and bias [H]."""

    attention: AttentionSpec
    layers: int
    window: int
    gates: Scope

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> LoopedAttention:
        """The first time; see MixerSpec. `cache` is the layer's number."""
        weights = LoopedWeights(scope / self.attention.names.module, self, norm=norm, adds=adds)
        return LoopedAttention(weights, cache, 0)


class LoopedWeights:
    """What all times of a layer share. `scope` is the attention's."""

    def __init__(
        self, scope: Scope, spec: LoopedAttentionSpec, *, norm: RMSNorm | None, adds: bool
    ) -> None:
        attention = spec.attention
        names, parts = attention.names, attention.parts
        self.spec, self.scope = spec, scope
        self.split = [local_units(part, scope.mesh.tp) for part in parts]
        self.qkv = ColumnLinear(scope, attention.width, parts, bias=attention.qkv_bias, norm=norm)
        self.out = RowLinear(
            scope / names.out, parts[0], attention.width, bias=attention.out_bias, adds=adds
        )
        assert attention.rope is not None, "no rope"
        self.rope = Rope(scope, attention.rope)
        heads = Part("gate", attention.heads, attention.heads)
        shard = Shard(axis="tp", dim=0, parts=(heads,))
        shape = (attention.heads, attention.head_dim)
        self._gate = spec.gates.param("weight", shape, shard=shard)
        self._gate_bias = spec.gates.param("bias", shape[:1], shard=shard, init="zeros")
        self._gate_HD = self._gate_bias_H = torch.empty(0)
        self.attend_all = self.attend_near = not_loaded
        self.write = not_loaded
        scope.on_finish(self._finish)

    def gates(self, q_THD: torch.Tensor) -> torch.Tensor:
        """The share of the first time's cache, [T, H, 1]."""
        score_TH = (q_THD * self._gate_HD).sum(-1) + self._gate_bias_H
        return score_TH.sigmoid()[..., None]

    def _finish(self) -> None:
        heads, kv_heads, *_ = self.split
        spec, scope = self.spec.attention, self.scope
        self._gate_HD, self._gate_bias_H = self._gate.take(), self._gate_bias.take()
        self.write = bind_kv_write(scope, kv_heads=kv_heads, head_dim=spec.head_dim)
        near = replace(spec, window=self.spec.window)
        problems = (one.problem(scope, heads=heads, kv_heads=kv_heads) for one in (spec, near))
        self.attend_all, self.attend_near = (bind_attention(scope, one) for one in problems)


class LoopedAttention:
    """x_TE -> y_TE, the layer's attention one of its times: see Mixer."""

    probed = False

    def __init__(self, weights: LoopedWeights, layer: int, time: int) -> None:
        self._weights, self._layer, self._time = weights, layer, time
        self._cache = time * weights.spec.layers + layer

    def again(self, time: int) -> LoopedAttention:
        """The same the time-th time, from 0."""
        return LoopedAttention(self._weights, self._layer, time)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The cache of this time."""
        weights = self._weights
        window = weights.spec.window if self._time else None
        spec = replace(weights.spec.attention, window=window)
        return (spec.form(weights.scope, self._cache, weights.split[1]),)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._weights.qkv.norms

    def queries(self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None) -> Handed:
        """The queries; keys and values of this time are in its cache."""
        weights = self._weights
        plan = batch.plans[batch.group_of_layer[self._cache]]
        parts = weights.qkv.project(x_TE).split_with_sizes(weights.qkv.sizes, dim=1)
        q_THD, k_TKD, v_TKD = (
            part_TC.unflatten(1, (heads, -1))
            for part_TC, heads in zip(parts, weights.split, strict=True)
        )
        weights.rope.rotate(q_THD, k_TKD, batch.positions_T, weights.rope.table_PR)
        weights.write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        gate_TH1 = weights.gates(q_THD) if self._time else None
        if at_N is None:
            return q_THD, gate_TH1
        return q_THD.index_select(0, at_N), chosen(gate_TH1, at_N)

    def attend_into(
        self, handed: Handed, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        (q_THD, gate_TH1), weights = handed, self._weights
        first = batch.plans[batch.group_of_layer[self._layer]]
        y_THD = weights.attend_all(q_THD, batch.kv[self._layer], first)
        if gate_TH1 is not None:
            own = batch.plans[batch.group_of_layer[self._cache]]
            near_THD = weights.attend_near(q_THD, batch.kv[self._cache], own)
            y_THD = torch.lerp(near_THD, y_THD, gate_TH1)
        return weights.out.project_into(y_THD.flatten(1), residual_TE)
