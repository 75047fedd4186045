"""Attention whose scores have a bias for each position that follows from its value: exp(a *
softplus(projection of all heads' values)) for each KV head (Shi et al. 2025, "Trainable dynamic
mask sparse attention"; Doge).

The bias is one more dimension of a key, which queries meet with 1 / scale. T tokens, E hidden size,
H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attended import Attended
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.errors import ConfigError

ROOM = 16
"""Dimensions behind those of a head, of which the bias takes the first."""


@dataclass(frozen=True, kw_only=True)
class ValueBiasedSpec:
    """`attention`: of any layer, with a rope and norms of queries and keys, without what only some
    families have."""

    attention: AttentionSpec

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ValueBiasedAttention:
        """See MixerSpec."""
        if scope.mesh.tp.size > 1:
            raise ConfigError(
                f"--tensor-parallel {scope.mesh.tp.size}: biases of this attention follow from the "
                "values of all heads; it runs on one device",
                field="tensor_parallel",
            )
        return ValueBiasedAttention(scope, cache, self.attention, norm=norm, adds=adds)


class ValueBiasedAttention(Attended):
    """x_TE -> y_TE: see Mixer and the file."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: AttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        scope = (scope / spec.names.module).of_cache(cache)
        assert spec.rope is not None and spec.qk_norm is not None, spec
        self._scope, self._cache, self._spec = scope, cache, spec
        self._value_dim = spec.head_dim
        parts = spec.parts
        self._qkv = ColumnLinear(scope, spec.width, parts, bias=spec.qkv_bias, norm=norm)
        self._out = RowLinear(
            scope / spec.names.out, parts[0], spec.width, bias=spec.out_bias, adds=adds
        )
        self._steps = WholeLinear(
            scope / "dt_proj", parts[2].size, spec.kv_heads, bias=spec.qkv_bias
        )
        self._strength = scope.param("A", (spec.kv_heads,), init="zeros", dtype=torch.float32)
        self._norms = [
            spec.qk_norm.build(scope / name, part)
            for name, part in zip(spec.qk_norm.names, parts[:2], strict=True)
        ]
        self._rope = Rope(scope, spec.rope)
        self._write = self._attend = not_loaded
        self._strength_K = torch.empty(0)
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        form = HeadsForm(
            cache=self._cache,
            kv_heads=self._spec.kv_heads,
            head_dim=self._spec.head_dim + ROOM,
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
        """q_THD, rotated, of the tokens `at_N` (None: all), whose keys and values are cached."""
        spec = self._spec
        q_TX, k_TX, v_TX = self._qkv.project(x_TE).split_with_sizes(self._qkv.sizes, dim=1)
        of_q, of_k = self._norms
        q_THD = of_q.norm(q_TX.unflatten(1, (spec.heads, -1)))
        k_TKD = of_k.norm(k_TX.unflatten(1, (spec.kv_heads, -1)))
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        steps_TK = self._steps.project(v_TX.contiguous()).float()
        bias_TK1 = torch.exp(self._strength_K * F.softplus(steps_TK))[..., None]
        k_TKD = F.pad(torch.cat((k_TKD, bias_TK1.to(k_TKD.dtype)), dim=2), (0, ROOM - 1))
        v_TKD = F.pad(v_TX.unflatten(1, (spec.kv_heads, -1)), (0, ROOM))
        q_THD = F.pad(F.pad(q_THD, (0, 1), value=1 / spec.scale), (0, ROOM - 1))
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    def _finish(self) -> None:
        scope = self._scope
        wide = replace(self._spec, head_dim=self._spec.head_dim + ROOM)
        self._write = bind_kv_write(scope, kv_heads=wide.kv_heads, head_dim=wide.head_dim)
        self._attend = bind_attention(
            scope, wide.problem(scope, heads=wide.heads, kv_heads=wide.kv_heads)
        )
        self._strength_K = self._strength.take()
