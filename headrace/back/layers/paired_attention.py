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

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.differential_attention import DifferentialHeads
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS, RMSNorm
from headrace.back.layers.scope import Scope
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
        self._spec = spec
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
        self._differential = DifferentialHeads(
            inner,
            scope,
            self._cache,
            RMS.build(inner / "subln", 2 * spec.head_dim, eps=spec.eps),
            heads=2 * self._pairs * (spec.heads // spec.kv_heads),
            kv_heads=2 * self._pairs,
            head_dim=spec.head_dim,
            first=spec.first,
            window=spec.window,
            writes=spec.source is None,
        )

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Its own cache, if it has one; see the module."""
        return () if self._spec.source is not None else (self._differential.form,)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._qkv.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD of the tokens `at_N` (None: all): first heads of a KV pair's pairs, then second
        ones."""
        dim = self._spec.head_dim
        q_TX, *kv = self._qkv.project(x_TE).split_with_sizes(self._qkv.sizes, dim=1)
        if kv:
            k_TKD, v_TPV = kv[0].unflatten(1, (-1, dim)), kv[1].unflatten(1, (-1, 2 * dim))
            self._differential.write(k_TKD, v_TPV.repeat_interleave(2, dim=1), batch)
        if self._spec.memory is not None:
            self._spec.memory.keep(at_N)
        q_TX = q_TX if at_N is None else q_TX.index_select(0, at_N)
        q_TPG2D = q_TX.unflatten(1, (self._pairs, -1, 2, dim))
        return q_TPG2D.transpose(2, 3).flatten(1, 3)

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        y_THV = self._differential.attend(q_THD, batch)
        first, second = y_THV.unflatten(1, (self._pairs, 2, -1)).unbind(2)
        y_TX = self._differential.taken_off(first.flatten(1, 2), second.flatten(1, 2))
        return self._out.project_into(y_TX, residual_TE)
