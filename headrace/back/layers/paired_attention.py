"""Differential attention (Ye et al. 2024) over pairs of neighbouring heads (Phi-4-mini-flash): what
the second head of a pair gives is taken off the first one's, times a learned factor. A layer may
read the cache of one before it (Sun et al. 2024).

Both heads of a pair read values of twice their width, those of both KV heads of a pair; the cache
holds them as in differential_attention.py, so that one call of op attention serves.

T tokens, E hidden size, H query heads, K KV heads, D head_dim; G query heads share a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.layers.differential_attention import LAMBDAS
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.scan_memory import ScanMemory
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class PairedAttentionSpec:
    """One layer's attention, in global sizes; nothing is rotated. `first`: what the factor begins
    with; `eps`: of the norm of what each pair gives; `window`: tokens a query sees, itself
    included, None: all; `source`: the cache that it reads, None: one of its own; `memory`: told
    which tokens the step goes on with."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    first: float
    eps: float
    window: int | None = None
    source: int | None = None
    memory: ScanMemory | None = None

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> PairedAttention:
        """See MixerSpec."""
        return PairedAttention(scope / "attn", cache, self, norm=norm, adds=adds)


class PairedAttention:
    """x_TE -> y_TE: see Mixer. `scope` is its own."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: PairedAttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        self._cache = cache if spec.source is None else spec.source
        scope = scope.of_cache(self._cache, windowed=spec.window is not None)
        self._scope, self._spec = scope, spec
        pairs = spec.kv_heads // 2
        sizes = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
        parts = [Part(name, heads * spec.head_dim, pairs) for name, heads in sizes.items()]
        own = parts if spec.source is None else parts[:1]
        self._pairs = local_units(parts[1], scope.mesh.tp)
        self._qkv = ColumnLinear(scope, spec.width, tuple(own), bias=True, merged="Wqkv", norm=norm)
        self._out = RowLinear(
            scope / "out_proj", parts[0], spec.width, bias=True, adds=adds, scale=1.0 - spec.first
        )
        inner = scope / "inner_cross_attn"
        self._lambdas = [inner.param(name, (spec.head_dim,), init="zeros") for name in LAMBDAS]
        self._norm = RMS.build(inner / "subln", 2 * spec.head_dim, eps=spec.eps)
        self._write = self._attend = not_loaded
        self._factor = torch.zeros(())
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Its own cache, if it has one; see the module."""
        if self._spec.source is not None:
            return ()
        form = HeadsForm(
            cache=self._cache,
            kv_heads=2 * self._pairs,
            head_dim=2 * self._spec.head_dim,
            kind="window" if self._spec.window else "full",
            span=self._spec.window,
            quantized=self._scope.kv_quantized,
        )
        return (form,)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._qkv.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THV of the tokens `at_N` (None: all): first heads of a KV pair's pairs, then second
        ones."""
        dim = self._spec.head_dim
        q_TX, *kv = self._qkv.project(x_TE).split_with_sizes(self._qkv.sizes, dim=1)
        if kv:
            k_TKD, v_TPV = kv[0].unflatten(1, (-1, dim)), kv[1].unflatten(1, (-1, 2 * dim))
            plan = batch.plans[batch.group_of_layer[self._cache]]
            values_TKV = v_TPV.repeat_interleave(2, dim=1)
            self._write(F.pad(k_TKD, (0, dim)), values_TKV, batch.kv[self._cache], plan.slot_T)
        if self._spec.memory is not None:
            self._spec.memory.keep(at_N)
        q_TX = q_TX if at_N is None else q_TX.index_select(0, at_N)
        q_TPG2D = q_TX.unflatten(1, (self._pairs, -1, 2, dim))
        return F.pad(q_TPG2D.transpose(2, 3).flatten(1, 3), (0, dim))

    def attend_into(
        self, q_THV: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        y_THV = self._attend(q_THV, batch.kv[self._cache], plan)
        first, second = y_THV.unflatten(1, (self._pairs, 2, -1)).unbind(2)
        y_TPV = self._norm.norm((first - self._factor * second).flatten(1, 2))
        return self._out.project_into(y_TPV.flatten(1), residual_TE)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        sizes = {"kv_heads": 2 * self._pairs, "head_dim": 2 * spec.head_dim}
        if spec.source is None:
            self._write = bind_kv_write(scope, **sizes)
        problem = AttentionProblem(
            **cached_heads(scope, **sizes),
            heads=2 * self._pairs * (spec.heads // spec.kv_heads),
            scale=spec.head_dim**-0.5,
            window=spec.window,
            verify_queries=scope.verify_queries,
        )
        self._attend = scope.bind(ATTENTION, problem)
        # A tensor, as new weights change it in place.
        q1, k1, q2, k2 = (param.take().float() for param in self._lambdas)
        self._factor = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + spec.first
