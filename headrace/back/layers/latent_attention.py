"""Multi-head latent attention (DeepSeek-V2, section 2.1) over a cache of latents.

Keys and values of all heads come from one latent per token; the cache holds that alone, beside a
rotated key that the heads share. Attention runs in the absorbed form: a head's key weight is
applied to its query, its value weight to its result, so that all heads read the latent itself.
Prompts are attended expanded instead where a kernel can (latent_expansion.py): each position's keys
and values are computed again from its latent, which is written to the cache as ever. With an
indexer (layers/indexer.py) a query reads the positions alone that it chooses, always absorbed.

T tokens, E hidden size, H query heads of this rank, C rank of the latent, R rotary dimensions, W =
C + R, D = nope + R, V value dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.expanded_attention.op import OP as EXPANDED_ATTENTION
from headrace.back.kernels.expanded_attention.op import ExpandedAttentionProblem
from headrace.back.kernels.head_linear.op import OP as HEAD_LINEAR
from headrace.back.kernels.head_linear.op import HeadLinearProblem
from headrace.back.kernels.latent_attention.op import OP as LATENT_ATTENTION
from headrace.back.kernels.latent_attention.op import LatentAttentionProblem
from headrace.back.kernels.latent_write.op import OP as LATENT_WRITE
from headrace.back.kernels.latent_write.op import LatentWriteProblem
from headrace.back.kernels.latent_write.quantized import unfit
from headrace.back.kernels.sparse_latent_attention.op import OP as SPARSE_LATENT_ATTENTION
from headrace.back.kernels.sparse_latent_attention.op import SparseLatentProblem
from headrace.back.layers.attended import chosen
from headrace.back.layers.decode_context import split_context
from headrace.back.layers.indexer import ChoiceSpec, PositionChoice
from headrace.back.layers.latent_expansion import ExpandedRows, expanded_rows, latents_of
from headrace.back.layers.linear import ColumnLinear, MergedTensor, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.query_scale import QueryFactors, QueryScaling
from headrace.back.layers.rope import NoRope, Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard, local_units
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LatentNames:
    """The module in its layer, and its output projection."""

    module: str = "self_attn"
    out: str = "o_proj"


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """One layer's attention, in global sizes.

    q_rank     rank of the queries' own down-projection; None: they are projected directly
    nope       dimensions of a query head that are not rotated
    values     dimensions of a head's value
    indexer    chooses the positions that are read; None: all are
    joint_gate the queries' up-projection holds, head by head, that of the gate of what the head
               gives, too; both read the down-projection, normed and then as it is (A.X K2)
    sinks      a learned score per head takes part in the softmax; only with an indexer
    window     tokens a query sees; then `indexer` chooses them. None: all before it
    key_norm   the norm of the rotated key, before its rotation; None: there is none
    latent_scale  what normed latents are multiplied with
    query_scale  how queries grow with their position; None: they do not
    source     the cache of a layer before that is read instead of one of its own; None: its own
    """

    width: int
    heads: int
    q_rank: int | None
    rank: int
    nope: int
    values: int
    scale: float
    rope: RopeSpec
    eps: float = 1e-6
    down_bias: bool = False
    out_bias: bool = False
    query_scale: QueryScaling | None = None
    gate: OutputGate | None = None
    indexer: ChoiceSpec | None = None
    joint_gate: bool = False
    latent_scale: float = 1.0
    sinks: bool = False
    window: int | None = None
    key_norm: str | None = None
    source: int | None = None
    names: LatentNames = LatentNames()

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> LatentAttention:
        """The layer. See AttentionSpec."""
        return LatentAttention(scope / self.names.module, cache, self, norm=norm, adds=adds)


class LatentQueries(NamedTuple):
    """A step's rotated queries: q_THW, absorbed but for rows that are expanded, which take their
    first `nope` elements from own_THN; the gates of what they give; and what the choice of
    positions hands on."""

    q_THW: torch.Tensor
    own_THN: torch.Tensor
    gate_TX: torch.Tensor | None
    index: Any = None


class LatentAttention:
    """x_TE -> y_TE. See layers/attention.py: Attention, whose face it has."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        layer: int,
        spec: LatentAttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        rotary = spec.rope.rotary_dim
        if reason := unfit(scope.kv_quantized, spec.rank + rotary, spec.rank, scope.block_tokens):
            raise ConfigError(f"--kv-dtype {scope.kv_quantized}: {reason}", field="kv_dtype")
        owns = spec.source is None
        self._layer, self._spec, self._scope = layer if owns else spec.source, spec, scope
        self._context = split_context(scope, kv_heads=1, whole=bool(spec.window or spec.indexer))
        self._indexer: PositionChoice[Any] | None = None
        if spec.indexer is not None:
            sizes = {"width": spec.width, "q_rank": spec.q_rank or 0}
            self._indexer = spec.indexer.build(scope / "indexer", layer + owns, **sizes)
            norm = None  # it reads what the norms give, too
        q_size = spec.heads * (spec.nope + rotary)
        queries = Part("q_proj", q_size, spec.heads)
        self._heads = local_units(queries, scope.mesh.tp)
        latent = Part("kv_a_proj_with_mqa", spec.rank + rotary, 1)
        first = queries if spec.q_rank is None else Part("q_a_proj", spec.q_rank, 1)
        # One GEMM for both down-projections: a small batch reads x once.
        gates = () if spec.gate is None else (spec.gate.part(spec.heads, spec.values),)
        parts = (first, latent, *gates) if owns else (first, *gates)
        self._down = ColumnLinear(scope, spec.width, parts, bias=spec.down_bias, norm=norm)
        self._q_norm: RMSNorm | None = None
        self._q_up: ColumnLinear | None = None
        if spec.q_rank is not None:
            self._q_norm = RMSNorm(scope / "q_a_layernorm", spec.q_rank, eps=spec.eps)
            self._q_up = self._up_projection(scope, spec.q_rank, q_size)
        self._kv_norm = RMSNorm(scope / "kv_a_layernorm", spec.rank, eps=spec.eps) if owns else None
        self._query_scale: QueryFactors | None = None
        if spec.query_scale is not None:
            self._query_scale = spec.query_scale.build(scope, spec.heads)
        self._key_norm = spec.key_norm and RMSNorm(scope / spec.key_norm, rotary, eps=spec.eps)
        heads = Part("kv_b_proj", spec.heads * (spec.nope + spec.values), spec.heads)
        self._kv_up = scope.param(
            "kv_b_proj.weight",
            (heads.size, spec.rank),
            shard=Shard(axis="tp", dim=0, parts=(heads,)),
        )
        values = Part("o_proj", spec.heads * spec.values, spec.heads)
        self._out = RowLinear(
            scope / spec.names.out, values, spec.width, bias=spec.out_bias, adds=adds
        )
        self._sinks = self._sinks_param() if spec.sinks else None
        self._rope = Rope(scope, spec.rope) if rotary else NoRope(scope)
        gate = OutputGate() if spec.joint_gate else spec.gate
        self._gate = gate and gate.build(scope, spec.heads, spec.values)
        self._absorb = self._expand = self._write = self._attend = not_loaded
        self._attend_chosen = not_loaded
        self._attend_expanded: Callable[..., torch.Tensor] | None = None
        self._key_HCN = self._value_HCV = torch.empty(0)
        scope.on_finish(self._finish)

    def _sinks_param(self) -> Param:
        heads = Part("sinks", self._spec.heads, self._spec.heads)
        assert self._spec.indexer is not None, "sinks stand beside chosen positions"
        shard = Shard(axis="tp", dim=0, parts=(heads,))
        return self._scope.param("sinks", (heads.size,), shard=shard, init="zeros")

    def _up_projection(self, scope: Scope, q_rank: int, q_size: int) -> ColumnLinear:
        """Of the queries' bottleneck."""
        spec = self._spec
        up = Part("q_b_proj", q_size, spec.heads)
        if not spec.joint_gate:
            return ColumnLinear(scope, q_rank, (up,), norm=None if spec.indexer else self._q_norm)
        gate = Part("gate", spec.heads * spec.values, spec.heads)
        both = MergedTensor(name=up.name, parts=(0, 1), groups=spec.heads)
        return ColumnLinear(scope, 2 * q_rank, (up, gate), tensors=(both,))

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        width = self._spec.rank + self._spec.rope.rotary_dim
        kind, span = ("window", self._spec.window) if self._spec.window else ("latent", None)
        kept = {"kind": kind, "span": span, "quantized": self._scope.kv_quantized}
        kept["rank"] = self._spec.rank
        latents: CacheForm = LatentForm(cache=self._layer, width=width, **kept)
        if self._context is not None:
            latents = self._context.form(latents)
        own = (latents,) if self._spec.source is None else ()
        return own if self._indexer is None else (*own, *self._indexer.kv_forms)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._down.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> LatentQueries:
        """Those of the tokens `at_N`, None: of all, whose latents are in the cache."""
        spec, kv = self._spec, batch.kv[self._layer]
        plan = batch.plans[batch.group_of_layer[self._layer]]
        down_TX = self._down.project(x_TE)
        q_TX, *rest = down_TX.split_with_sizes(self._down.sizes, dim=1)
        latent_TW = rest.pop(0) if spec.source is None else None
        gate_TX = rest[0] if rest else None
        index: Any = None
        if self._q_up is not None:
            plain_TX, q_TX = q_TX, self._normed(q_TX, self._q_up)
            if self._indexer is not None:
                index = self._indexer.queries(x_TE, q_TX, batch, at_N)
            if spec.joint_gate:
                q_TX = torch.cat((q_TX, plain_TX), dim=1)
            q_TX = self._q_up.project(q_TX)
            if spec.joint_gate:
                q_TX, gate_TX = q_TX.split_with_sizes(self._q_up.sizes, dim=1)
        elif self._indexer is not None:
            index = self._indexer.queries(x_TE, x_TE[:, :0], batch, at_N)
        q_THD = q_TX.unflatten(1, (self._heads, -1))
        q_THW = self._rotated(q_THD, latent_TW, batch, plan, kv)
        if at_N is not None:
            q_THD, q_THW = q_THD.index_select(0, at_N), q_THW.index_select(0, at_N)
            gate_TX = chosen(gate_TX, at_N)
        rows = self._expanded_rows(plan, kv, self) if at_N is None else None
        first = len(q_THW) if rows is None else rows.first
        if first:
            self._absorb(q_THD[:first, :, : spec.nope], q_THW[:first, :, : spec.rank])
        own_THN = q_THD[..., : spec.nope]
        if self._query_scale is not None:
            positions_T = batch.positions_T if at_N is None else batch.positions_T[at_N]
            scale_TH1 = self._query_scale.factors(positions_T)
            q_THW, own_THN = q_THW * scale_TH1, own_THN * scale_TH1
        return LatentQueries(q_THW, own_THN, gate_TX, index)

    def _rotated(
        self,
        q_THD: torch.Tensor,
        latent_TW: torch.Tensor | None,
        batch: Batch,
        plan: AttentionPlan,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """q_THW, of which only the rotated part is there yet. Latents, where the layer has its own,
        are in the cache."""
        spec, table_PR = self._spec, self._rope.table_PR
        rotary = spec.rope.rotary_dim
        q_THW = q_THD.new_empty((*q_THD.shape[:2], spec.rank + rotary))
        if latent_TW is None:
            if rotary:
                q_THW[..., spec.rank :] = q_THD[..., spec.nope :]
                turned_THR = q_THW[..., spec.rank :]
                self._rope.rotate(turned_THR, turned_THR[:, :0], batch.positions_T, table_PR)
            return q_THW
        if self._key_norm:
            latent_TC, key_TR = latent_TW.split_with_sizes((spec.rank, rotary), dim=1)
            latent_TW = torch.cat((latent_TC, self._key_norm.norm(key_TR)), dim=1)
        slot_T = plan.slot_T if self._context is None else self._context.slots(plan)
        self._write(q_THD, latent_TW, batch.positions_T, table_PR, kv, slot_T, q_THW)
        return q_THW

    def attend_into(
        self, queries: LatentQueries, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THW, own_THN, gate_TX, index = queries
        kv, plan = batch.kv[self._layer], batch.plans[batch.group_of_layer[self._layer]]
        rows = self._expanded_rows(plan, kv, self._attend)
        if rows is not None:
            y_THV = self._expanded(q_THW, own_THN, kv, plan, rows)
        else:
            y_THV = q_THW.new_empty((q_THW.shape[0], self._heads, self._spec.values))
            if index is None:
                latent_THC = self._attend(q_THW, kv, plan)
            else:
                assert self._indexer is not None
                chosen_TK = self._indexer.choose(index, batch)
                latent_THC = self._attend_chosen(q_THW, kv, plan, chosen_TK.flatten(1))
            self._expand(latent_THC, y_THV)
        y_TX = y_THV.flatten(1)
        if gate_TX is not None and self._gate is not None:
            y_TX = self._gate.gated(y_TX, gate_TX)
        return self._out.project_into(y_TX, residual_TE)

    def _expanded_rows(
        self, plan: AttentionPlan, kv: torch.Tensor, owner: object
    ) -> ExpandedRows | None:
        if self._attend_expanded is None:
            return None
        elements = self._heads * (self._spec.nope + self._spec.values)
        return expanded_rows(plan, kv, owner, elements * self._scope.dtype.itemsize)

    def _expanded(
        self,
        q_THW: torch.Tensor,
        own_THN: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
        rows: ExpandedRows,
    ) -> torch.Tensor:
        """y_THV of a step some of whose rows are expanded."""
        assert self._attend_expanded is not None
        spec, first = self._spec, rows.first
        form, dtype = self._scope.kv_quantized, q_THW.dtype
        latent_SW = latents_of(rows, kv, spec.rank, form, dtype)
        latent_SC, rotated_SR = latent_SW[:, : spec.rank], latent_SW[:, spec.rank :]
        y_THV = self._attend_expanded(
            own_THN,
            q_THW[..., spec.rank :],
            torch.matmul(latent_SC, self._key_HCN),
            rotated_SR,
            torch.matmul(latent_SC, self._value_HCV),
            rows.begin_R,
            plan,
        )
        if rows.decodes is not None:
            latent_THC = self._attend(q_THW[:first], kv, rows.decodes)
            if rows.decode_T11 is None:
                self._expand(latent_THC, y_THV[:first])
            else:
                own_THV = torch.empty_like(y_THV[:first])
                self._expand(latent_THC, own_THV)
                y_THV[:first] = torch.where(rows.decode_T11, own_THV, y_THV[:first])
        return y_THV

    def _normed(self, q_TX: torch.Tensor, up: ColumnLinear) -> torch.Tensor:
        """What goes into the queries' up-projection."""
        assert self._q_norm is not None
        return q_TX if up.norms else self._q_norm.norm(q_TX)

    def _finish(self) -> None:
        spec, scope, rope = self._spec, self._scope, self._spec.rope
        facts = {"device": scope.kind, "dtype": scope.dtype, "heads": self._heads}
        weight_HXC = self._kv_up.take().unflatten(0, (self._heads, spec.nope + spec.values))
        key_HNC, value_HVC = weight_HXC.split_with_sizes((spec.nope, spec.values), dim=1)
        absorb = HeadLinearProblem(**facts, inputs=spec.nope, outputs=spec.rank)
        expand = HeadLinearProblem(**facts, inputs=spec.rank, outputs=spec.values)
        key_HCN, value_HVC = key_HNC.transpose(1, 2).contiguous(), value_HVC.contiguous()
        self._absorb = scope.bind(HEAD_LINEAR, absorb, key_HCN)
        self._expand = scope.bind(HEAD_LINEAR, expand, value_HVC)
        cache: dict[str, Any] = {"rank": spec.rank, "rotary": rope.rotary_dim}
        cache |= {"block_tokens": scope.block_tokens, "quantized": scope.kv_quantized}
        if self._kv_norm is not None:
            write = {"nope": spec.nope, "eps": spec.eps, "layout": rope.layout}
            problem = LatentWriteProblem(**facts, **cache, **write)
            weight_C = self._kv_norm.weight_E * spec.latent_scale
            self._write = scope.bind(LATENT_WRITE, problem, weight_C)
        if spec.indexer is not None:
            sparse = SparseLatentProblem(
                **facts,
                **cache,
                top_k=spec.indexer.top_k,
                scale=spec.scale,
                sinks=spec.sinks,
            )
            sinks = self._sinks.take().float() if self._sinks is not None else None
            self._attend_chosen = scope.bind(SPARSE_LATENT_ATTENTION, sparse, sinks)
            return
        latent = LatentAttentionProblem(**facts, **cache, scale=spec.scale)
        if self._context is not None:  # a prompt's rows lie on all ranks: none is expanded
            self._attend = self._context.of_latents(scope, latent)
            return
        self._attend = scope.bind(LATENT_ATTENTION, latent)
        if scope.deterministic:  # a prompt's bits would depend on how it is cut into steps
            return
        expanded = ExpandedAttentionProblem(
            **facts,
            own=spec.nope,
            values=spec.values,
            rotary=rope.rotary_dim,
            scale=spec.scale,
        )
        self._attend_expanded = scope.bind_if_served(EXPANDED_ATTENTION, expanded)
        if self._attend_expanded is not None:
            self._key_HCN, self._value_HCV = key_HCN, value_HVC.transpose(1, 2)
