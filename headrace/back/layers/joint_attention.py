"""Self-attention and cross-attention of a decoder layer under one softmax: a query weighs the
tokens before it together with all outputs of the encoder, by the same projections (T5Gemma 2; Zhang
et al. 2025).

Both parts are attended to by themselves, and joined by their log-sum-exps. T tokens of a step, S
outputs of the encoder, E hidden size, H heads, D head_dim; H is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.merge_attention.op import OP as MERGE
from headrace.back.kernels.merge_attention.op import MergeAttentionProblem
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class JointAttentionSpec:
    """One layer's, in global sizes. `window`: tokens of its own that a query sees, itself included,
    None: all before it; `span`: the most outputs of the encoder, which are not rotated."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    span: int
    bias: bool
    rope: RopeSpec
    qk_norm: QKNorm
    window: int | None = None
    softcap: float | None = None
    module: str = "self_attn"

    def build(self, scope: Scope, cache: int) -> JointAttention:
        """The layer; `scope` is that of the decoder layer around it."""
        return JointAttention(scope, cache, self)


class JointAttention:
    """x_TE -> y_TE: see the top of the file. Its caches are `cache` and the one behind it."""

    def __init__(self, scope: Scope, cache: int, spec: JointAttentionSpec) -> None:
        scope = scope / spec.module
        counts = (spec.heads, spec.kv_heads, spec.kv_heads)
        parts = tuple(
            Part(f"{name}_proj", count * spec.head_dim, count)
            for name, count in zip("qkv", counts, strict=True)
        )
        self._spec, self._scope, self._cache = spec, scope, cache
        self._own = scope.of_cache(cache, windowed=spec.window is not None)
        self._split = [local_units(part, scope.mesh.tp) for part in parts]
        self._qkv = ColumnLinear(scope, spec.width, parts, bias=spec.bias)
        self._norms = [
            spec.qk_norm.build(scope / name, part)
            for name, part in zip(spec.qk_norm.names, parts[:2], strict=True)
        ]
        self._rope = Rope(scope, spec.rope)
        self._out = RowLinear(scope / "o_proj", parts[0], spec.width, bias=spec.bias)
        self._attend = self._attend_source = self._merge = not_loaded
        self._write = self._write_source = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of its own tokens, and of the encoder's outputs."""
        spec = self._spec
        shape = {"kv_heads": self._split[1], "head_dim": spec.head_dim}
        kind = "full" if spec.window is None else "window"
        own, source = self._own.kv_quantized, self._scope.kv_quantized
        return (
            HeadsForm(cache=self._cache, **shape, kind=kind, span=spec.window, quantized=own),
            HeadsForm(
                cache=self._cache + 1, **shape, kind="cross", span=spec.span, quantized=source
            ),
        )

    def write(
        self, source_SE: torch.Tensor, batch: Batch, slots_GS: tuple[torch.Tensor, ...]
    ) -> None:
        """Keeps the keys and values of these outputs in the slots of their group."""
        _, k_SHD, v_SHD = self._projected(source_SE)
        cache = self._cache + 1
        slot_S = slots_GS[batch.group_of_layer[cache]]
        self._write_source(self._norms[1].norm(k_SHD), v_SHD, batch.kv[cache], slot_S)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD, normed and rotated, of the tokens `at_N` (None: all), whose keys and values are in
        the cache."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        q_THD, k_TKD, v_TKD = self._projected(x_TE)
        q_THD, k_TKD = self._norms[0].norm(q_THD), self._norms[1].norm(k_TKD)
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual."""
        lse_TH, source_TH = q_THD.new_empty((2, *q_THD.shape[:2]), dtype=torch.float32)
        plans = [batch.plans[batch.group_of_layer[self._cache + i]] for i in range(2)]
        y_THD = self._attend(q_THD, batch.kv[self._cache], plans[0], lse_TH)
        of_source_THD = self._attend_source(q_THD, batch.kv[self._cache + 1], plans[1], source_TH)
        self._merge(y_THD, lse_TH, of_source_THD, source_TH)
        return self._out.project_into(y_THD.flatten(1), residual_TE)

    def _projected(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = self._qkv.project(x_TE).unflatten(1, (sum(self._split), -1))
        q_THD, k_TKD, v_TKD = qkv.split_with_sizes(self._split, dim=1)
        return q_THD, k_TKD, v_TKD

    def _finish(self) -> None:
        spec, heads, kv_heads = self._spec, self._split[0], self._split[1]
        for place, causal in ((self._own, True), (self._scope, False)):
            sizes = {"kv_heads": kv_heads, "head_dim": spec.head_dim}
            write = bind_kv_write(place, **sizes)
            problem = AttentionProblem(
                **cached_heads(place, **sizes),
                heads=heads,
                scale=spec.scale,
                softcap=spec.softcap,
                window=spec.window if causal else None,
                causal=causal,
            )
            attend = place.bind(ATTENTION, problem)
            if causal:
                self._write, self._attend = write, attend
            else:
                self._write_source, self._attend_source = write, attend
        joined = MergeAttentionProblem(
            device=self._scope.kind, dtype=self._scope.dtype, heads=heads, head_dim=spec.head_dim
        )
        self._merge = self._scope.bind(MERGE, joined)
