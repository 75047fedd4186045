"""Self-attention of a decoder layer over the paged KV cache.

T tokens, E hidden size, H query heads, K KV heads, D head_dim; H and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.qk_rope_write.op import OP as QK_ROPE_WRITE
from headrace.back.kernels.qk_rope_write.op import QKRopeWrite, QKRopeWriteProblem
from headrace.back.layers.alibi import local_slopes
from headrace.back.layers.attended import Queries
from headrace.back.layers.attention_names import SEPARATE, AttentionNames
from headrace.back.layers.chosen_positions import ChosenPositions, ChosenSizes
from headrace.back.layers.decode_context import DecodeContext, split_context
from headrace.back.layers.heads_cache import bind_kv_write, cached_heads
from headrace.back.layers.indexer import ChoiceSpec
from headrace.back.layers.linear import ColumnLinear, QKVProjection, RowLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMS_NO_WEIGHT, RMSNorm, SplitRMSNorm
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.position_bias import RelativeBias, RootBias
from headrace.back.layers.qk_norm import HeadNorm, QKNorm
from headrace.back.layers.query_scale import QueryScaling
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard, local_units


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention, in global sizes.

    window     tokens a query sees, itself included; None: all before it
    chunk      it sees those of its chunk of so many tokens, up to itself (Llama 4)
    rope       None: no position embedding (NoPE layers)
    clip       queries, keys and values are cut to this magnitude as they come out of the projection
    gate       of what heads give
    slopes     of ALiBi, one per query head; none: scores have no bias of position
    sinks      a learned score per head, beside those of the positions, takes part in the softmax
    out_norm   of what all heads give together: its name, and its epsilon
    value_dim  of a head's value, where it is less than `head_dim`; zeros are cached behind it
    value_scale, out_scale  what values, and the weight that leads back, are multiplied with
    value_eps    of a norm without weight over each value; None: there is none
    keys_are_values  what goes into that norm is what goes into the keys'
    chooser    says which positions are read; None: all are
    position_bias  what is added to scores by distance
    late_length  behind this position scores grow, below their cap: see op attention; 0: they do not
    out_width  of what it gives, where that is not `width`
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    clip: float | None = None
    slopes: tuple[float, ...] = ()
    sinks: bool = False
    query_scale: QueryScaling | None = None
    gate: OutputGate | None = None
    out_norm: tuple[str, float] | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    out_scale: float = 1.0
    value_eps: float | None = None
    keys_are_values: bool = False
    chooser: ChoiceSpec | None = None
    position_bias: RelativeBias | RootBias | None = None
    late_length: int = 0
    out_width: int | None = None
    names: AttentionNames = SEPARATE

    @property
    def plain_values(self) -> bool:
        """Whether values are cached as they come out of the projection."""
        same = self.value_dim in (None, self.head_dim) and self.value_scale == 1.0
        return same and self.value_eps is None

    @property
    def cache_kind(self) -> str:
        """Which tokens of its cache are kept (core/kv/kinds)."""
        return "chunked" if self.chunk else "window" if self.window else "full"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Attention:
        """The layer. `norm`, `adds`: see Attention."""
        return Attention(scope, cache, self, norm=norm, adds=adds)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of the projection, in global sizes: queries, keys and, unless they are the keys,
        values."""
        names, dim = self.names, self.value_dim or self.head_dim
        q = Part(names.query, self.heads * self.head_dim, self.heads)
        k = Part(names.key, self.kv_heads * self.head_dim, self.kv_heads)
        if self.keys_are_values:
            assert self.value_eps is not None and self.gate is None, self
            return q, k
        return q, k, Part(names.value, self.kv_heads * dim, self.kv_heads)

    def form(self, scope: Scope, cache: int, kv_heads: int) -> HeadsForm:
        """Of its cache, with this rank's heads."""
        return HeadsForm(
            cache=cache,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            kind=self.cache_kind,
            span=self.window or self.chunk,
            quantized=scope.kv_quantized,
        )

    def shared_context(self, scope: Scope) -> DecodeContext | None:
        """How ranks share out its cache; not where scores depend on where a position stands."""
        far = self.chooser or self.slopes or self.position_bias or self.late_length
        return split_context(scope, self.kv_heads, whole=bool(far or self.window or self.chunk))

    def choice(self, scope: Scope, layer: int) -> ChosenPositions | None:
        """Of positions, if it reads chosen ones."""
        if self.chooser is None:
            return None
        sizes = ChosenSizes(
            width=self.width, head_dim=self.head_dim, kv_heads=self.kv_heads, scale=self.scale
        )
        return ChosenPositions(scope, layer, self.chooser, sizes)

    def problem(
        self, scope: Scope, *, heads: int, kv_heads: int, sinks: bool = False
    ) -> AttentionProblem:
        """That of op attention, with this rank's heads."""
        return AttentionProblem(
            device=scope.kind,
            dtype=scope.dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            block_tokens=scope.block_tokens,
            scale=self.scale,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            quantized=scope.kv_quantized,
            sinks=sinks,
            verify_queries=scope.verify_queries,
            slopes=local_slopes(self.slopes, scope.mesh.tp),
            bias_width=0 if self.position_bias is None else self.position_bias.reach + 1,
            late_length=self.late_length if scope.max_positions > self.late_length + 1 else 0,
        )


class Attention:
    """x_TE -> y_TE: projects, norms, rotates, writes the step's KV, attends, projects back.

    `scope` is the layer's. `norm` stands before it: if `norms`, x is what goes into that norm.
    `adds`: y goes into the residual as it is."""

    probed = True

    def __init__(
        self,
        scope: Scope,
        layer: int,
        spec: AttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        names, scope = spec.names, scope / spec.names.module
        scope = scope.of_cache(layer, windowed=spec.cache_kind != "full")
        q, k, *_ = parts = spec.parts
        value_dim = spec.value_dim or spec.head_dim
        self._layer, self._spec, self._scope = layer, spec, scope
        self._chosen = spec.choice(scope, layer)
        norm = None if self._chosen is not None else norm  # its indexer reads what that gives, too
        self._context = spec.shared_context(scope)
        self._split = [local_units(part, scope.mesh.tp) for part in parts]
        self._heads, self._kv_heads = self._split[:2]
        self._cache_scales = scope.cache_scales_of(spec.kv_heads)
        gates = () if spec.gate is None else (spec.gate.part(spec.heads, value_dim),)
        tiled = names.tiles(spec.heads, spec.kv_heads)
        self._qkv = self._projection((*parts, *gates), tiled, norm)
        self._out = RowLinear(
            scope / names.out,
            Part(names.out, spec.heads * value_dim, spec.heads),
            spec.out_width or spec.width,
            bias=spec.out_bias,
            adds=adds,
            transposed=names.transposed,
            scale=spec.out_scale,
            tiled=tiled,
        )
        self._out_norm = self._build_out_norm(value_dim)
        self._sinks = self._sinks_param() if spec.sinks else None
        self._qk_norms: tuple[HeadNorm, HeadNorm] | None = None
        if spec.qk_norm is not None:
            build, (of_q, of_k) = spec.qk_norm.build, spec.qk_norm.names
            self._qk_norms = build(scope / of_q, q), build(scope / of_k, k)
        self._value_norm = None
        if spec.value_eps is not None:
            self._value_norm = RMS_NO_WEIGHT.build(scope, value_dim, eps=spec.value_eps)
        self._rope = Rope(scope, spec.rope) if spec.rope else None
        self._gate = spec.gate and spec.gate.build(scope, spec.heads, value_dim)
        self._attend = self._write = not_loaded
        self._query_scale = spec.query_scale and spec.query_scale.build(scope, spec.heads)
        self._fused: QKRopeWrite | None = None
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        form: CacheForm = self._spec.form(self._scope, self._layer, self._kv_heads)
        form = form if self._context is None else self._context.form(form)
        return (form,) if self._chosen is None else (form, *self._chosen.kv_forms)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._qkv.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> Queries:
        """q_THD, normed and rotated, and the gates of what they give, of the tokens `at_N` (None:
        all), whose keys and values are in the cache."""
        plan = batch.plans[batch.group_of_layer[self._layer]]
        kv = batch.kv[self._layer]
        qkv_TC, gate_TX = self._qkv.project(x_TE), None
        if self._spec.gate is not None:
            *qkv_sizes, gate_size = self._qkv.sizes
            qkv_TC, gate_TX = qkv_TC.split_with_sizes((sum(qkv_sizes), gate_size), dim=1)
        if self._fused is not None:
            own_PR = self._rope.table_PR if self._rope else batch.positions_T[:0]
            table_PR = own_PR if batch.rope_table_TR is None else batch.rope_table_TR
            q_THD = self._fused(qkv_TC, batch.positions_T, table_PR, kv, plan.slot_T)
        else:
            q_THD = self._separately(qkv_TC, batch, kv, plan.slot_T)
        if self._query_scale is not None:
            q_THD = q_THD * self._query_scale.factors(batch.positions_T)
        if batch.probe is not None:
            batch.probe.see(self._layer, self._problem, q_THD, kv, plan)
        index = None if self._chosen is None else self._chosen.queries(x_TE, batch, at_N)
        if at_N is not None:
            q_THD, gate_TX = q_THD[at_N], None if gate_TX is None else gate_TX[at_N]
        return q_THD, gate_TX, index

    def attend_into(
        self, queries: Queries, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THD, gate_TX, index = queries
        kv, plan = batch.kv[self._layer], batch.plans[batch.group_of_layer[self._layer]]
        if self._chosen is None:
            y_THD = self._attend(q_THD, kv, plan)
        else:
            y_THD = self._chosen.attend(q_THD, kv, plan, index, batch)
        y_TX = y_THD[..., : self._spec.value_dim].flatten(1)
        if gate_TX is not None and self._gate is not None:
            y_TX = self._gate.gated(y_TX, gate_TX)
        if self._out_norm is not None:
            y_TX = self._out_norm.norm(y_TX)
        return self._out.project_into(y_TX, residual_TE)

    def _projection(
        self, parts: tuple[Part, ...], tiled: tuple[int, int], norm: RMSNorm | None
    ) -> QKVProjection:
        """Queries, keys, values and gates of x."""
        spec, names = self._spec, self._spec.names
        own = names.own_tensor(spec.heads, tiled, gated=bool(spec.gate and not spec.gate.name))
        return ColumnLinear(
            self._scope,
            spec.width,
            parts,
            bias=spec.qkv_bias,
            merged=names.merged,
            groups=spec.kv_heads if names.by_group else 1,
            tensors=() if own is None else (own,),
            transposed=names.transposed,
            norm=norm,
        )

    def _separately(
        self, qkv_TC: torch.Tensor, batch: Batch, kv: torch.Tensor, slot_T: torch.Tensor
    ) -> torch.Tensor:
        """Norm, rotation and KV write by an op each; returns q_THD."""
        if self._spec.clip is not None:
            qkv_TC.clamp_(-self._spec.clip, self._spec.clip)
        sizes = self._qkv.sizes[: len(self._split)]
        q_THD, k_TKD, *values = (
            part_TC.unflatten(1, (heads, -1))
            for part_TC, heads in zip(
                qkv_TC.split_with_sizes(sizes, dim=1), self._split, strict=True
            )
        )
        v_TKD = self._cached_values(values[0] if values else k_TKD)
        after_rope = self._spec.qk_norm is not None and self._spec.qk_norm.after_rope
        if not after_rope:
            q_THD, k_TKD = self._normed(q_THD, k_TKD)
        if self._rope is not None:
            table_PR = self._rope.table_PR if batch.rope_table_TR is None else batch.rope_table_TR
            self._rope.rotate(q_THD, k_TKD, batch.positions_T, table_PR)
        if after_rope:
            q_THD, k_TKD = self._normed(q_THD, k_TKD)
        self._write(k_TKD, v_TKD, kv, slot_T)
        return q_THD

    def _cached_values(self, v_TKD: torch.Tensor) -> torch.Tensor:
        """As they are cached."""
        if self._value_norm is not None:
            v_TKD = self._value_norm.norm(v_TKD)
        lacking = self._spec.head_dim - v_TKD.shape[2]
        if lacking or self._spec.value_scale != 1.0:
            v_TKD = F.pad(v_TKD * self._spec.value_scale, (0, lacking))
        return v_TKD

    def _normed(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._qk_norms is None:
            return q_THD, k_TKD
        assert self._spec.qk_norm is not None
        of_q, of_k = self._qk_norms
        if self._spec.qk_norm.over != "width":
            return of_q.norm(q_THD), of_k.norm(k_TKD)
        q_TW, k_TW = of_q.norm(q_THD.flatten(1)), of_k.norm(k_TKD.flatten(1))
        return q_TW.view(q_THD.shape), k_TW.view(k_TKD.shape)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        sizes = {"kv_heads": self._kv_heads, "head_dim": spec.head_dim}
        self._fused = self._bind_fused(cached_heads(scope, **sizes))
        if self._fused is None:
            self._write = bind_kv_write(scope, **sizes, scales=self._cache_scales)
        self._problem = spec.problem(
            scope, heads=self._heads, kv_heads=self._kv_heads, sinks=self._sinks is not None
        )
        if self._chosen is not None:
            self._chosen.bind(heads=self._heads, kv_heads=self._kv_heads)
            return
        sinks_H = None if self._sinks is None else self._sinks.take().float()
        bias = () if spec.position_bias is None else (spec.position_bias.table,)
        weights = (sinks_H, *bias) if bias or sinks_H is not None else ()
        if self._context is not None:
            self._write = self._context.writes(self._write)
            self._fused = self._fused and self._context.writes(self._fused)
            self._attend = self._context.of_heads(scope, self._problem, sinks_H)
        else:
            self._attend = bind_attention(scope, self._problem, *weights)

    def _build_out_norm(self, value_dim: int) -> SplitRMSNorm | None:
        if self._spec.out_norm is None:
            return None
        name, eps = self._spec.out_norm
        values = Part(name, self._spec.heads * value_dim, self._spec.heads)
        return SplitRMSNorm(self._scope / name, values, eps=eps)

    def _sinks_param(self) -> Param:
        name = self._spec.names.sinks
        heads = Part(name, self._spec.heads, self._spec.heads)
        shard = Shard(axis="tp", dim=0, parts=(heads,))
        return self._scope.param(name, (heads.size,), shard=shard, init="zeros")

    def _bind_fused(self, shape: dict[str, Any]) -> QKRopeWrite | None:
        """Norm, rotation and KV write in one kernel, if there is one for this layer."""
        rope, qk_norm = self._spec.rope, self._spec.qk_norm
        weights: list[torch.Tensor | None] = [None, None]
        if qk_norm is not None:
            fusible = [norm for norm in self._qk_norms or () if isinstance(norm, RMSNorm)]
            if len(fusible) != len(weights) or qk_norm.after_rope:
                return None
            weights = [norm.weight_E for norm in fusible]
        left_out = "qk-rope" in self._scope.unfused or bool(rope and rope.by_heads)
        if left_out or self._spec.clip is not None or not self._spec.plain_values:
            return None
        problem = QKRopeWriteProblem(
            **shape,
            fixed=bool(self._cache_scales),
            heads=self._heads,
            rotary_dim=rope.rotary_dim if rope else 0,
            layout=rope.layout if rope else "half",
            eps=qk_norm.eps if qk_norm is not None else None,
        )
        return self._scope.bind_fused(QK_ROPE_WRITE, problem, *weights, *self._cache_scales)
