"""Attention whose queries and whose way back are those of experts (Shen et al. 2024, "JetMoE";
Zhang et al. 2022, "Mixture of attention heads"): a router chooses a few for each token, each with a
head of queries for every KV head.

All experts' projections are computed for each token, as one GEMM each way, and what was not chosen
is left out: their weights are a small part of the model's, and no token waits for another.

T tokens, E hidden size, K KV heads, D head_dim, X experts, S of them chosen, W = K D; K is this
rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.route.op import OP as ROUTE
from headrace.back.kernels.route.op import RouteProblem
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_size, local_units

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [T, K S, D], and the chosen experts and their weights [T, S]."""


@dataclass(frozen=True, kw_only=True)
class RoutedAttentionSpec:
    """One layer's attention, in global sizes. `experts`, of which each token takes `chosen`."""

    width: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    rope: RopeSpec
    name: str = "self_attention"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> RoutedAttention:
        """See MixerSpec; the norm is not part of it, since the router reads what it gives, too."""
        return RoutedAttention(scope / self.name, cache, self, adds=adds)


class RoutedAttention:
    """x_TE -> y_TE: see Mixer. `scope` is its own."""

    probed = norms = False

    def __init__(self, scope: Scope, cache: int, spec: RoutedAttentionSpec, *, adds: bool) -> None:
        self._scope, self._cache, self._spec = scope.of_cache(cache), cache, spec
        self._adds = adds
        size = spec.kv_heads * spec.head_dim
        heads, keys, values = (Part(name, size, spec.kv_heads) for name in ("heads", "k", "v"))
        self._kv_heads = local_units(heads, scope.mesh.tp)
        self._width = local_size(heads, scope.mesh.tp)
        self._kv = ColumnLinear(scope, spec.width, (keys, values), merged="kv_proj")
        within, shape = scope / "experts", (spec.experts, size, spec.width)
        self._router = within.param("router.layer.weight", (spec.experts, spec.width))
        rows, columns = (Shard(axis="tp", dim=dim, parts=(heads,)) for dim in (1, 2))
        self._query = within.param("input_linear.weight", shape, shard=rows)
        back = (spec.experts, spec.width, size)
        self._back = within.param("output_linear.weight", back, shard=columns)
        self._bias = within.param("bias", (spec.width,), init="zeros")
        self._rope = Rope(scope, spec.rope)
        self._logits = self._route = self._queries = self._out = not_loaded
        self._write = self._attend = not_loaded
        self._bias_E: torch.Tensor | None = None
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        form = HeadsForm(
            cache=self._cache,
            kv_heads=self._kv_heads,
            head_dim=self._spec.head_dim,
            quantized=self._scope.kv_quantized,
        )
        return (form,)

    def queries(self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None) -> Routed:
        """See Mixer."""
        spec, tokens = self._spec, len(x_TE)
        expert_TS, weight_TS = self._route(self._logits(x_TE))
        all_TXW = self._queries(x_TE).view(tokens, spec.experts, self._width)
        index_TSW = expert_TS.long()[..., None].expand(-1, -1, self._width)
        q_TSKD = all_TXW.gather(1, index_TSW).unflatten(2, (self._kv_heads, spec.head_dim))
        q_THD = q_TSKD.transpose(1, 2).flatten(1, 2)
        k_TKD, v_TKD = (
            part_TC.unflatten(1, (self._kv_heads, spec.head_dim))
            for part_TC in self._kv.project(x_TE).split_with_sizes(self._kv.sizes, dim=1)
        )
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        if at_N is None:
            return q_THD, expert_TS, weight_TS
        queries_NHD = q_THD.index_select(0, at_N)
        return queries_NHD, expert_TS.index_select(0, at_N), weight_TS.index_select(0, at_N)

    def attend_into(
        self, routed: Routed, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual."""
        q_THD, expert_TS, weight_TS = routed
        plan = batch.plans[batch.group_of_layer[self._cache]]
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan)
        y_TKSD = y_THD.unflatten(1, (self._kv_heads, self._spec.chosen))
        y_TSW = y_TKSD.transpose(1, 2).flatten(2) * weight_TS[..., None].to(y_THD.dtype)
        all_TXW = y_TSW.new_zeros((len(y_TSW), self._spec.experts, self._width))
        index_TSW = expert_TS.long()[..., None].expand(-1, -1, self._width)
        y_TE = self._out(all_TXW.scatter_(1, index_TSW, y_TSW).flatten(1))
        axis = self._scope.mesh.tp
        if axis.rank == 0:
            y_TE = y_TE + self._bias_E
        if axis.size == 1:
            return y_TE
        share = Partial(y_TE, axis)
        return share if self._adds else share.total()

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        self._logits = bind_linear(scope, self._router.take(), None, wide=True)
        route = RouteProblem(
            device=scope.kind, experts=spec.experts, top_k=spec.chosen, softmax_chosen=True
        )
        self._route = scope.bind(ROUTE, route, None)
        self._queries = bind_linear(scope, self._query.take().flatten(0, 1), None)
        back_EW = self._back.take().transpose(0, 1).flatten(1)
        self._out = bind_linear(scope, back_EW.contiguous(), None)
        self._bias_E = self._bias.take()
        sizes = {"kv_heads": self._kv_heads, "head_dim": spec.head_dim}
        self._write = bind_kv_write(scope, **sizes)
        problem = AttentionProblem(
            **cached_heads(scope, **sizes),
            heads=self._kv_heads * spec.chosen,
            scale=spec.head_dim**-0.5,
            verify_queries=scope.verify_queries,
        )
        self._attend = scope.bind(ATTENTION, problem)
