"""Attention whose values are those of experts (K2 Horizon's "mixture of value attention"): a router
chooses a few for each token, whose results, each behind silu, are weighed and added up.

Few tokens read the experts that they chose alone, by a copy of these; for more, all experts'
projections are computed as one GEMM and what was not chosen is left out.

T tokens, E hidden size, X experts, S of them chosen, V values of this rank's KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.route.op import OP as ROUTE
from headrace.back.kernels.route.op import RouteProblem
from headrace.back.layers.attention import Attention, AttentionSpec
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import ColumnLinear, QKVProjection
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.param import WeightPiece
from headrace.back.parallel.shard import Part, Shard, local_size

COPIES = 3
"""How often a chosen expert's weights pass the memory: read, written, read again."""
AT_ONCE = 256
"""Tokens of which all experts' values lie in memory."""


@dataclass(frozen=True, kw_only=True)
class ValueExperts:
    """How values are made: of `experts`, each token takes `chosen`. `score`, `scale`: see op
    `route`; the weights of several add up to the scale. `biased`: the router has a bias, which only
    chooses. The router is "v_router" in the attention's module, the experts "v_experts.N"."""

    experts: int
    chosen: int
    score: str
    scale: float
    biased: bool


@dataclass(frozen=True, kw_only=True)
class ValueExpertsSpec(AttentionSpec):
    """An attention with such values."""

    values: ValueExperts

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ValueExpertsAttention:
        """See AttentionSpec; the norm is not part of it, since the router reads what it gives."""
        return ValueExpertsAttention(scope, cache, self, adds=adds)


class ValueExpertsAttention(Attention):
    """x_TE -> y_TE by ValueExpertsSpec."""

    _spec: ValueExpertsSpec

    def _projection(
        self, parts: tuple[Part, ...], tiled: tuple[int, int], norm: RMSNorm | None
    ) -> QKVProjection:
        """See Attention."""
        spec = self._spec
        return ValueExpertsProjection(
            self._scope, spec.width, parts, spec.values, bias=spec.qkv_bias
        )


class ValueExpertsProjection:
    """x_TE -> y_TC: queries, keys, values and what comes behind these, of `parts`. See
    QKVProjection."""

    norms = False

    def __init__(
        self,
        scope: Scope,
        width: int,
        parts: tuple[Part, ...],
        spec: ValueExperts,
        *,
        bias: bool,
    ) -> None:
        query, key, value, *others = parts
        self._scope, self._spec = scope, spec
        self._dense = ColumnLinear(scope, width, (query, key, *others), bias=bias)
        self._values = local_size(value, scope.mesh.tp)
        self.sizes = [*self._dense.sizes[:2], self._values, *self._dense.sizes[2:]]
        self._router = scope.param("v_router.weight", (spec.experts, width))
        self._bias = None
        if spec.biased:
            self._bias = scope.param("v_router.bias", (spec.experts,), init="zeros")
        pieces = tuple(
            WeightPiece(
                name=scope.name(f"v_experts.{i}.weight"),
                shape=(value.size, width),
                offset=i * value.size,
            )
            for i in range(spec.experts)
        )
        self._experts = scope.param(
            "v_experts.weight",
            (spec.experts * value.size, width),
            pieces=pieces,
            shard=Shard(axis="tp", dim=0, parts=(value,) * spec.experts),
        )
        self._experts_XVE = torch.empty(0)
        self._logits = self._all = self._route = not_loaded
        self.project: Linear = self._projected
        scope.on_finish(self._finish)

    def _projected(self, x_TE: torch.Tensor) -> torch.Tensor:
        before, behind = self._dense.sizes[:2], self._dense.sizes[2:]
        qk_TC, rest_TC = self._dense.project(x_TE).split_with_sizes((sum(before), sum(behind)), 1)
        expert_TS, weight_TS = self._route(self._logits(x_TE))
        few = COPIES * expert_TS.numel() <= self._spec.experts and not self._scope.deterministic
        values = self._of_copies if few else self._of_all
        v_TSV = F.silu(values(x_TE, expert_TS.long()))
        v_TV = (v_TSV * weight_TS[..., None].to(v_TSV.dtype)).sum(1)
        return torch.cat((qk_TC, v_TV, rest_TC), dim=1)

    def _of_copies(self, x_TE: torch.Tensor, expert_TS: torch.Tensor) -> torch.Tensor:
        """[T, S, V]."""
        return (self._experts_XVE[expert_TS] @ x_TE[:, None, :, None]).squeeze(-1)

    def _of_all(self, x_TE: torch.Tensor, expert_TS: torch.Tensor) -> torch.Tensor:
        """The same, a part of the tokens at a time."""
        parts = []
        for x_NE, expert_NS in zip(x_TE.split(AT_ONCE), expert_TS.split(AT_ONCE), strict=True):
            all_NXV = self._all(x_NE).unflatten(1, (self._spec.experts, -1))
            index_NSV = expert_NS[..., None].expand(-1, -1, self._values)
            parts.append(all_NXV.gather(1, index_NSV))
        return torch.cat(parts)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        self._logits = bind_linear(scope, self._router.take(), None, wide=True)
        problem = RouteProblem(
            device=scope.kind,
            experts=spec.experts,
            top_k=spec.chosen,
            score=spec.score,
            renormalize=spec.chosen > 1,
            scale=spec.scale,
            bias=spec.biased,
        )
        bias_X = None if self._bias is None else self._bias.take_float()
        self._route = scope.bind(ROUTE, problem, bias_X)
        weight = self._experts.take()
        self._experts_XVE = weight.unflatten(0, (spec.experts, -1))
        self._all = bind_linear(scope, weight, None)
