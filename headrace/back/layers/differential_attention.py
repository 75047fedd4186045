"""Differential attention (Ye et al. 2024, "Differential transformer"; as DiffLlama has it,
transformers 5.23): what the second half of the heads gives is taken off the first half's, times a
learned factor.

All heads read values of twice their width: those of KV head k and of KV head k + K/2, for both of
these. The cache holds them as heads of 2 D dimensions, keys with zeros behind them, so that one
call of op attention serves.

T tokens, E hidden size, H query heads, K KV heads, D head_dim, P pairs of heads, V = 2 D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT, LayerNorm, RMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part
from headrace.base.errors import ConfigError

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DifferentialHeads:
    """What all differential attention has: a cache of heads of 2 D dimensions, and of two heads
    one, normed. `scope` has the learned vectors, `place` is the layer's, of its cache; H and K are
    this rank's. `first`: what the factor begins with; `window`: tokens a query sees, itself
    included, None: all; `writes`: the cache is its own."""

    def __init__(
        self,
        scope: Scope,
        place: Scope,
        cache: int,
        norm: RMSNorm | LayerNorm,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        first: float,
        window: int | None = None,
        writes: bool = True,
    ) -> None:
        self._place, self._cache, self._dim, self._window = place, cache, head_dim, window
        self._heads, self._kv_heads, self._first, self._writes = heads, kv_heads, first, writes
        self._norm = norm
        self._lambdas = [scope.param(name, (head_dim,), init="zeros") for name in _LAMBDAS]
        self._write = self._attend = not_loaded
        self._factor = torch.zeros(())
        place.on_finish(self._finish)

    @property
    def form(self) -> HeadsForm:
        """Of the cache."""
        return HeadsForm(
            cache=self._cache,
            kv_heads=self._kv_heads,
            head_dim=2 * self._dim,
            kind="window" if self._window else "full",
            span=self._window,
            quantized=self._place.kv_quantized,
        )

    def write(self, k_TKD: torch.Tensor, values_TKV: torch.Tensor, batch: Batch) -> None:
        """Keeps keys, and values of twice their width."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(F.pad(k_TKD, (0, self._dim)), values_TKV, batch.kv[self._cache], plan.slot_T)

    def attend(self, q_THD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What each head gives, [T, H, 2 D]."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        q_THV = F.pad(q_THD, (0, self._dim))
        y_THV: torch.Tensor = self._attend(q_THV, batch.kv[self._cache], plan)
        return y_THV

    def taken_off(self, first_TPV: torch.Tensor, second_TPV: torch.Tensor) -> torch.Tensor:
        """The first head of each pair less the second one's share, normed; [T, P 2 D]."""
        return self._norm.norm(first_TPV - self._factor * second_TPV).flatten(1)

    def _finish(self) -> None:
        place = self._place
        sizes = {"kv_heads": self._kv_heads, "head_dim": 2 * self._dim}
        if self._writes:
            self._write = bind_kv_write(place, **sizes)
        problem = AttentionProblem(
            **cached_heads(place, **sizes),
            heads=self._heads,
            scale=self._dim**-0.5,
            window=self._window,
            verify_queries=place.verify_queries,
        )
        self._attend = place.bind(ATTENTION, problem)
        # A tensor, as new weights change it in place.
        q1, k1, q2, k2 = (param.take().float() for param in self._lambdas)
        self._factor = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self._first


@dataclass(frozen=True, kw_only=True)
class DifferentialAttentionSpec:
    """One layer's attention, in global sizes. `first`: what the factor begins with; `eps`: of the
    norm of what each pair of heads gives."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    first: float
    eps: float
    bias: bool = False

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> DifferentialAttention:
        """See MixerSpec. ConfigError on several ranks: heads of both halves belong together."""
        if scope.mesh.tp.size > 1:
            raise ConfigError(
                f"--tensor-parallel {scope.mesh.tp.size}: differential attention takes head h + {self.heads // 2} off "
                "head h, on one device; use 1",
                field="tensor_parallel",
            )
        return DifferentialAttention(scope / "self_attn", cache, self, norm=norm, adds=adds)


class DifferentialAttention:
    """x_TE -> y_TE: see Mixer. `scope` is its own."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: DifferentialAttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        scope = scope.of_cache(cache)
        sizes = {"q_proj": spec.heads, "k_proj": spec.kv_heads, "v_proj": spec.kv_heads}
        parts = tuple(Part(name, heads * spec.head_dim, heads) for name, heads in sizes.items())
        self._heads = tuple(sizes.values())
        self._qkv = ColumnLinear(scope, spec.width, parts, bias=spec.bias, norm=norm)
        self._out = RowLinear(
            scope / "o_proj",
            parts[0],
            spec.width,
            bias=spec.bias,
            adds=adds,
            scale=1.0 - spec.first,
        )
        self._differential = DifferentialHeads(
            scope,
            scope,
            cache,
            RMS_NO_WEIGHT.build(scope, 2 * spec.head_dim, eps=spec.eps),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            first=spec.first,
        )
        self._rope = Rope(scope, spec.rope)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the module."""
        return (self._differential.form,)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._qkv.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD, rotated, of the tokens `at_N` (None: all)."""
        parts = self._qkv.project(x_TE).split_with_sizes(self._qkv.sizes, dim=1)
        q_THD, k_TKD, v_TKD = (
            part_TC.unflatten(1, (heads, -1))
            for part_TC, heads in zip(parts, self._heads, strict=True)
        )
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        values_TKV = torch.cat(v_TKD.chunk(2, dim=1), dim=2).repeat(1, 2, 1)
        self._differential.write(k_TKD, values_TKV, batch)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        first, second = self._differential.attend(q_THD, batch).chunk(2, dim=1)
        return self._out.project_into(self._differential.taken_off(first, second), residual_TE)
