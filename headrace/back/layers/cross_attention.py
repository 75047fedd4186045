"""Cross-attention of a decoder layer: its queries over the keys and values of an encoder's outputs
(Vaswani et al. 2017, section 3.2.3).

These are written once, when a request starts, into a cache of their own, and read in every step:
`write` and `attend_into`. T tokens of a step, S outputs of the encoder, E hidden size, H heads, D
head_dim; H is this rank's. Heads of keys may serve several of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec:
    """One layer's cross-attention, in global sizes. `source`: width of the encoder's outputs;
    `span`: the most of them; `names`: module, query, key, value, output. `kv_heads`: where there
    are fewer than `heads`; `softcap`: of scores."""

    width: int
    source: int
    heads: int
    head_dim: int
    scale: float
    span: int
    bias: bool
    names: tuple[str, str, str, str, str]
    kv_heads: int | None = None
    softcap: float | None = None

    def build(self, scope: Scope, cache: int) -> CrossAttention:
        """The layer; `scope` is that of the decoder layer around it."""
        return CrossAttention(scope, cache, self)


class CrossAttention:
    """x_TE -> y_TE: see the top of the file. `cache`: the id of its cache."""

    def __init__(self, scope: Scope, cache: int, spec: CrossAttentionSpec) -> None:
        module, *projections, out = spec.names
        scope = scope / module
        kv_heads = spec.kv_heads or spec.heads
        query, key, value = (
            Part(name, count * spec.head_dim, count)
            for name, count in zip(projections, (spec.heads, kv_heads, kv_heads), strict=True)
        )
        self._spec, self._scope, self._cache = spec, scope, cache
        self._heads, self._kv_heads = (local_units(part, scope.mesh.tp) for part in (query, key))
        self._query = ColumnLinear(scope, spec.width, (query,), bias=spec.bias)
        self._key_value = ColumnLinear(scope, spec.source, (key, value), bias=spec.bias)
        self._out = RowLinear(scope / out, query, spec.width, bias=spec.bias)
        self._attend = self._write = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_form(self) -> HeadsForm:
        """Its cache."""
        return HeadsForm(
            cache=self._cache,
            kv_heads=self._kv_heads,
            head_dim=self._spec.head_dim,
            kind="cross",
            span=self._spec.span,
            quantized=self._scope.kv_quantized,
        )

    def write(
        self, source_SE: torch.Tensor, batch: Batch, slots_GS: tuple[torch.Tensor, ...]
    ) -> None:
        """Keeps the keys and values of these outputs in the slots of its group."""
        key_value = self._key_value.project(source_SE).unflatten(1, (2 * self._kv_heads, -1))
        k_SHD, v_SHD = key_value.split_with_sizes([self._kv_heads] * 2, dim=1)
        slot_S = slots_GS[batch.group_of_layer[self._cache]]
        self._write(k_SHD, v_SHD, batch.kv[self._cache], slot_S)

    def attend_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        q_THD = self._query.project(x_TE).unflatten(1, (self._heads, -1))
        if batch.probe is not None:
            batch.probe.see(self._cache, self._problem, q_THD, batch.kv[self._cache], plan)
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan)
        return self._out.project_into(y_THD.flatten(1), residual_TE)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        sizes = {"kv_heads": self._kv_heads, "head_dim": spec.head_dim}
        self._write = bind_kv_write(scope, **sizes)
        self._problem = AttentionProblem(
            **cached_heads(scope, **sizes),
            heads=self._heads,
            scale=spec.scale,
            softcap=spec.softcap,
            causal=False,
        )
        self._attend = scope.bind(ATTENTION, self._problem)
