"""Self-attention of a decoder layer over the paged KV cache.

T tokens, E hidden size, H query heads, K KV heads, D head_dim; H and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.back.attention.forms import CacheForm, HeadsForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.kv_write.op import OP as KV_WRITE
from headrace.back.kernels.kv_write.op import KVWriteProblem
from headrace.back.kernels.qk_rope_write.op import OP as QK_ROPE_WRITE
from headrace.back.kernels.qk_rope_write.op import QKRopeWrite, QKRopeWriteProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm, SplitRMSNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention, in global sizes.

    window     tokens a query sees, itself included; None: all before it
    rope       None: no position embedding (NoPE layers)
    qk_norm    None, "head" (over each head, Qwen3) or "width" (over all heads together, OLMo 2)
    merged     name of the checkpoint tensor that holds query, key and value, if they are one there
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    qk_norm_eps: float = 1e-6
    unit_offset: bool = False
    merged: str | None = None

    def build(
        self, scope: Scope, layer: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Attention:
        """The layer. `norm`, `adds`: see Attention."""
        return Attention(scope / "self_attn", layer, self, norm=norm, adds=adds)


class SelfAttentionSpec(Protocol):
    """What a decoder layer's attention is made of: AttentionSpec, LatentAttentionSpec."""

    def build(
        self, scope: Scope, layer: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> SelfAttention:
        """The attention of layer number `layer`, whose scope it is."""
        ...


class SelfAttention(Protocol):
    """The face of every attention over the KV cache. See Attention.

    kv_forms   its caches
    probed     whether a batch's probe sees its queries
    """

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]: ...

    @property
    def norms(self) -> bool: ...

    @property
    def probed(self) -> bool: ...

    def queries(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None: ...


class Attention:
    """x_TE -> y_TE: projects, norms, rotates, writes the step's KV, attends, projects back.

    `norm` stands before it: if `norms`, x is what goes into that norm. `adds`: y goes into the
    residual as it is."""

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
        q = Part("q_proj", spec.heads * spec.head_dim, spec.heads)
        k = Part("k_proj", spec.kv_heads * spec.head_dim, spec.kv_heads)
        v = Part("v_proj", spec.kv_heads * spec.head_dim, spec.kv_heads)
        self._layer = layer
        self._spec = spec
        self._scope = scope
        self._heads = local_units(q, scope.mesh.tp)
        self._kv_heads = local_units(k, scope.mesh.tp)
        self._split = [self._heads, self._kv_heads, self._kv_heads]
        self._qkv = ColumnLinear(
            scope, spec.width, (q, k, v), bias=spec.qkv_bias, merged=spec.merged, norm=norm
        )
        self._out = RowLinear(scope / "o_proj", q, spec.width, bias=spec.out_bias, adds=adds)
        self._q_norm = self._norm(scope / "q_norm", q)
        self._k_norm = self._norm(scope / "k_norm", k)
        self._rope = Rope(scope, spec.rope) if spec.rope else None
        self._attend = self._write = not_loaded
        self._fused: QKRopeWrite | None = None
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        form = HeadsForm(
            cache=self._layer,
            kv_heads=self._kv_heads,
            head_dim=self._spec.head_dim,
            kind="window" if self._spec.window else "full",
            span=self._spec.window,
            quantized=self._scope.kv_quantized,
        )
        return (form,)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._qkv.norms

    def queries(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q_THD, normed and rotated; keys and values are in the cache."""
        plan = batch.plans[batch.group_of_layer[self._layer]]
        kv = batch.kv[self._layer]
        qkv_TC = self._qkv.project(x_TE)
        if self._fused is not None:
            table_PR = self._rope.table_PR if self._rope else batch.positions_T[:0]
            q_THD = self._fused(qkv_TC, batch.positions_T, table_PR, kv, plan.slot_T)
        else:
            q_THD = self._separately(qkv_TC, batch, plan, kv)
        if batch.probe is not None:
            batch.probe.see(self._layer, self._problem, q_THD, kv, plan)
        return q_THD

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        plan = batch.plans[batch.group_of_layer[self._layer]]
        kv = batch.kv[self._layer]
        return self._out.project_into(self._attend(q_THD, kv, plan).flatten(1), residual_TE)

    def _separately(
        self, qkv_TC: torch.Tensor, batch: Batch, plan: AttentionPlan, kv: torch.Tensor
    ) -> torch.Tensor:
        """Norm, rotation and KV write by an op each; returns q_THD."""
        shape = (qkv_TC.shape[0], -1, self._spec.head_dim)
        q_THD, k_TKD, v_TKD = qkv_TC.view(shape).split_with_sizes(self._split, dim=1)
        if self._spec.qk_norm == "head":
            q_THD, k_TKD = self._q_norm.norm(q_THD), self._k_norm.norm(k_TKD)
        elif self._spec.qk_norm == "width":
            q_THD = self._q_norm.norm(q_THD.flatten(1)).view(shape)
            k_TKD = self._k_norm.norm(k_TKD.flatten(1)).view(shape)
        if self._rope is not None:
            self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        self._write(k_TKD, v_TKD, kv, plan.slot_T)
        return q_THD

    def _norm(self, scope: Scope, part: Part) -> RMSNorm | SplitRMSNorm | None:
        spec = self._spec
        if spec.qk_norm == "head":
            return RMSNorm(scope, spec.head_dim, eps=spec.qk_norm_eps, unit_offset=spec.unit_offset)
        if spec.qk_norm == "width":
            return SplitRMSNorm(scope, part, eps=spec.qk_norm_eps)
        return None

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        shape = {
            "device": scope.kind,
            "dtype": scope.dtype,
            "kv_heads": self._kv_heads,
            "head_dim": spec.head_dim,
            "block_tokens": scope.block_tokens,
        }
        self._fused = self._bind_fused(shape)
        if self._fused is None:
            self._write = scope.bind(
                KV_WRITE, KVWriteProblem(**shape, quantized=scope.kv_quantized)
            )
        self._problem = AttentionProblem(
            **shape,
            heads=self._heads,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            quantized=scope.kv_quantized,
        )
        self._attend = scope.bind(ATTENTION, self._problem)

    def _bind_fused(self, shape: dict[str, Any]) -> QKRopeWrite | None:
        """Norm, rotation and KV write in one kernel, if there is one for this layer."""
        spec, rope = self._spec, self._spec.rope
        if spec.qk_norm == "width":
            return None
        normed = spec.qk_norm == "head"
        problem = QKRopeWriteProblem(
            **shape,
            heads=self._heads,
            rotary_dim=rope.rotary_dim if rope else 0,
            layout=rope.layout if rope else "half",
            eps=spec.qk_norm_eps if normed else None,
            quantized=self._scope.kv_quantized,
        )
        weights = [norm.weight_E if normed else None for norm in (self._q_norm, self._k_norm)]
        return self._scope.bind_fused(QK_ROPE_WRITE, problem, *weights)
