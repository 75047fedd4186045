"""A transformer block that several layers of a decoder use, each with low-rank adapters of its own
(Glorioso et al. 2024, "The Zamba2 suite"). It reads the residual beside the token's embedding, and
what it gives is not added to the residual.

T tokens, E hidden size, H query heads, K KV heads, D head_dim, I inner size, R rank of an adapter;
H, K and I are this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import HeadsForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.gated_act.op import OP as GATED_ACT
from headrace.back.kernels.gated_act.op import GatedAct, GatedActProblem
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part, local_units
from headrace.base.errors import ConfigError

ATTENTION_ADAPTERS = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")
MLP_ADAPTERS = "gate_up_proj_adapter_list"


@dataclass(frozen=True, kw_only=True)
class SharedBlockSpec:
    """`attention`: of width 2 E, with a rope or none. `inner`: of the MLP; `bias`: whether its
    projections have one; `merged`: the tensor that holds its gate and up, None: each has its own.
    `rank`: R, 0: there are no adapters; `adapts_attention`: queries, keys and values have some as
    the MLP has."""

    attention: AttentionSpec
    width: int
    inner: int
    activation: str
    eps: float
    rank: int
    bias: bool = False
    merged: str | None = "gate_up_proj"
    adapts_attention: bool = False


class SharedBlock:
    """(x_TE, embedding_TE) -> y_TE. `scope` is the block's own, in the first layer that uses it."""

    def __init__(self, scope: Scope, spec: SharedBlockSpec) -> None:
        attention, inner = spec.attention, spec.inner
        if scope.kv_quantized and scope.kv_plain:
            raise ConfigError(
                "--kv-dtype-skip-layers: this model's attention is shared between layers, whose "
                "caches are all alike",
                field="kv_dtype_skip_layers",
            )
        self._scope, self._spec = scope, spec
        self._parts = attention.parts
        self._inner_parts = (Part("gate_proj", inner, inner), Part("up_proj", inner, inner))
        self._split = [local_units(part, scope.mesh.tp) for part in self._parts]
        self._qkv = ColumnLinear(scope / "self_attn", attention.width, self._parts)
        self._out = RowLinear(scope / "self_attn" / "o_proj", self._parts[0], spec.width)
        self._gate_up = ColumnLinear(
            scope / "feed_forward",
            spec.width,
            self._inner_parts,
            bias=spec.bias,
            merged=spec.merged,
        )
        self._down = RowLinear(
            scope / "feed_forward" / "down_proj", self._inner_parts[0], spec.width, bias=spec.bias
        )
        self._before = RMS.build(scope / "input_layernorm", attention.width, eps=spec.eps)
        self._between = RMS.build(scope / "pre_ff_layernorm", spec.width, eps=spec.eps)
        self._rope = None if attention.rope is None else Rope(scope, attention.rope)
        self._attend = self._write = not_loaded
        self._act: GatedAct = not_loaded
        scope.on_finish(self._finish)

    @property
    def width(self) -> int:
        """E."""
        return self._spec.width

    def form(self, cache: int) -> HeadsForm:
        """The cache of one use."""
        return HeadsForm(
            cache=cache,
            kv_heads=self._split[1],
            head_dim=self._spec.attention.head_dim,
            quantized=self._scope.kv_quantized,
        )

    def adapters(self, number: int) -> tuple[tuple[Adapter, ...], Adapter | None]:
        """Of queries, keys and values, and of the MLP, if there are any, for the decoder's use of
        shared blocks with this number."""
        spec, scope, index = self._spec, self._scope, str(number)
        attention = tuple(
            Adapter(scope / "self_attn" / name / index, spec.attention.width, spec.rank, (part,))
            for name, part in zip(ATTENTION_ADAPTERS, self._parts, strict=True)
            if spec.adapts_attention
        )
        if not spec.rank:
            return attention, None
        place = scope / "feed_forward" / MLP_ADAPTERS / index
        return attention, Adapter(place, spec.width, spec.rank, self._inner_parts)

    def forward(
        self, x_TE: torch.Tensor, embedding_TE: torch.Tensor, use: SharedBlockUse, batch: Batch
    ) -> torch.Tensor:
        """y_TE; keys and values go into the use's cache."""
        both_TF = self._before.norm(torch.cat((x_TE, embedding_TE), dim=1))
        qkv_TC = self._qkv.project(both_TF)
        q_TQ, k_TQ, v_TQ = qkv_TC.split_with_sizes(self._qkv.sizes, dim=1)
        for part_TQ, adapter in zip((q_TQ, k_TQ, v_TQ), use.attention, strict=False):
            part_TQ += adapter.of(both_TF)
        q_THD, k_TKD, v_TKD = (
            part_TQ.unflatten(1, (heads, -1))
            for part_TQ, heads in zip((q_TQ, k_TQ, v_TQ), self._split, strict=True)
        )
        if self._rope is not None:
            self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        plan, kv = batch.plans[batch.group_of_layer[use.cache]], batch.kv[use.cache]
        self._write(k_TKD, v_TKD, kv, plan.slot_T)
        attended_TE = self._out.project(self._attend(q_THD, kv, plan).flatten(1))
        x_TE = self._between.norm(attended_TE)
        inner_TC = self._gate_up.project(x_TE)
        if use.mlp is not None:
            inner_TC += use.mlp.of(x_TE)
        return self._down.project(self._act(inner_TC))

    def _finish(self) -> None:
        scope, attention = self._scope, self._spec.attention
        heads, kv_heads, _ = self._split
        problem = attention.problem(scope, heads=heads, kv_heads=kv_heads)
        self._attend = scope.bind(ATTENTION, problem)
        self._write = bind_kv_write(scope, kv_heads=kv_heads, head_dim=attention.head_dim)
        act = GatedActProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=self._gate_up.sizes[0],
            activation=self._spec.activation,
        )
        self._act = scope.bind(GATED_ACT, act)


class SharedBlockUse:
    """One layer's use of a block: its cache, its adapters, and the projection of what the block
    gives. `scope` is the layer's."""

    def __init__(self, scope: Scope, block: SharedBlock, *, number: int, cache: int) -> None:
        self.cache = cache
        self.attention, self.mlp = block.adapters(number)
        self.form = block.form(cache)
        self._block = block
        width = block.width
        self._linear = WholeLinear(scope / "linear", width, width)

    def forward(self, x_TE: torch.Tensor, embedding_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """y_TE."""
        return self._linear.project(self._block.forward(x_TE, embedding_TE, self, batch))


class Adapter:
    """x_TI -> y_TO through R numbers; `parts` are those of the projection that it adds to."""

    def __init__(self, scope: Scope, inputs: int, rank: int, parts: Sequence[Part]) -> None:
        self._left = WholeLinear(scope / "0", inputs, rank)
        self._right = ColumnLinear(scope, rank, tuple(parts), merged="1")

    def of(self, x_TI: torch.Tensor) -> torch.Tensor:
        """y_TO."""
        return self._right.project(self._left.project(x_TI))
