"""Attention with biases by distance from a token's state (state_biased_attention.py), as Inkling 2
has it (transformers 5.23, modeling_inkling2): the lengths of queries, keys and states are bounded,
values normed, heads gated, and every token has a sink for each head. Where queries, keys and values
read inputs of their own, the taps of the convolutions follow in part from the token.

T tokens, E hidden size, H query heads, K KV heads, D head_dim, W taps, R rank of the states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.merge_attention.op import share_beside
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.earlier_inputs import EarlierInputs
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_size, local_units

CONVOLUTIONS = ("k_sconv", "v_sconv")
Handed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [T, H, D], their states [T, H, R] in float32, gates [T, HD] and sinks [T, H]."""


@dataclass(frozen=True, kw_only=True)
class ClippedAttentionSpec:
    """`attention`: of any layer, with an epsilon for values and without norms, a rope and what only
    some families have. `rank`: R; `extent`: how far biases reach; `longest`: of queries and keys,
    and of states; `apart`: there are three inputs [3, T, E]."""

    attention: AttentionSpec
    rank: int
    extent: int
    taps: int
    longest: tuple[float, float]
    apart: bool
    names: tuple[str, str, str] = ("wr_du", "gate_attn", "attn_sink_proj")

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ClippedAttention:
        """See MixerSpec; no norm becomes part of it."""
        return ClippedAttention(scope, cache, self, adds=adds)


class ClippedAttention:
    """x -> y_TE: see Mixer and the file. Its second cache is that of the convolutions."""

    probed = norms = False

    def __init__(
        self, scope: Scope, cache: int, spec: ClippedAttentionSpec, *, adds: bool = False
    ) -> None:
        attention = spec.attention
        scope = scope / attention.names.module
        scope = scope.of_cache(cache, windowed=attention.window is not None)
        assert attention.rope is None and attention.value_eps is not None, spec
        self._scope, self._cache, self._spec = scope, cache, spec
        q, k, v = attention.parts
        self._heads, self._kv_heads = (local_units(part, scope.mesh.tp) for part in (q, k))
        states, gate, sink = spec.names
        own = (
            Part(states, attention.heads * spec.rank, attention.heads),
            Part(gate, q.size, attention.heads),
            Part(sink, attention.heads, attention.heads),
        )
        width, names = attention.width, CONVOLUTIONS
        self._apart: tuple[ColumnLinear, ...] = ()
        self._conv: ShortConv | TokenConv
        if spec.apart:
            taps = [Part(f"{one}.weight_proj", k.units * spec.taps, k.units) for one in names]
            self._in = ColumnLinear(scope, width, (q, *own))
            self._apart = tuple(
                ColumnLinear(scope, width, parts) for parts in zip((k, v), taps, strict=True)
            )
            self._conv = TokenConv(scope, cache + 1, (k, v), taps=spec.taps, names=names)
        else:
            self._in = ColumnLinear(scope, width, (q, k, v, *own))
            self._conv = ShortConv(
                scope,
                cache + 1,
                (k, v),
                taps=spec.taps,
                activation="",
                separate=names,
                adds_input=True,
                factor=(spec.taps + 1) ** -0.5,
            )
        self._out = RowLinear(scope / attention.names.out, q, width, adds=adds)
        self._value_norm = RMS_NO_WEIGHT.build(scope, attention.head_dim, eps=attention.value_eps)
        head = Part("heads", attention.heads, attention.heads)
        self._of_q, self._of_states = (
            scope.param(
                f"{one}_l2_clip.scale",
                (attention.heads, size),
                shard=Shard(axis="tp", dim=0, parts=(head,)),
                init="ones",
                dtype=torch.float32,
            )
            for one, size in (("q", attention.head_dim), ("rel", spec.rank))
        )
        self._lines = scope.param(
            "rel_logits_proj.proj", (spec.rank, spec.extent), dtype=torch.float32
        )
        self._growth = attention.query_scale and attention.query_scale.build(scope, attention.heads)
        self._of_q_HD = self._of_states_HR = torch.empty(0)
        self._write = self._attend = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """What this layer keeps in the KV cache."""
        attention = self._spec.attention
        heads = attention.form(self._scope, self._cache, self._kv_heads)
        return heads, self._conv.form

    def queries(self, x: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None) -> Handed:
        """Of the tokens `at_N` (None: all), whose keys and values are cached. x: [T, E], or the
        inputs of queries, keys and values."""
        spec, rows = self._spec, scan_rows(batch, self._cache + 1)
        if isinstance(self._conv, TokenConv):
            x_of_q, *others = x.unbind(0)
            q_TX, *own = self._in.project(x_of_q).split_with_sizes(self._in.sizes, dim=1)
            k_TX, v_TX = (
                linear.project(x_TE) for linear, x_TE in zip(self._apart, others, strict=True)
            )
            (k_TX, k_taps), (v_TX, v_taps) = (
                both.split_with_sizes(linear.sizes, dim=1)
                for linear, both in zip(self._apart, (k_TX, v_TX), strict=True)
            )
            kv_TC = torch.cat((k_TX, v_TX), dim=1)
            kv_TC = self._conv.apply(kv_TC, (k_taps, v_taps), batch, rows)
        else:
            q_size, k_size, v_size, *sizes = self._in.sizes
            q_TX, kv_TC, *own = self._in.project(x).split_with_sizes(
                (q_size, k_size + v_size, *sizes), dim=1
            )
            kv_TC = self._conv.apply(kv_TC, batch, rows)
        states_TX, gate_TX, sink_TH = own
        k_TKD, v_TKD = (
            part_TX.unflatten(1, (self._kv_heads, -1)) for part_TX in kv_TC.chunk(2, dim=1)
        )
        of_heads, of_states = spec.longest
        k_TKD = clipped(k_TKD.float(), of_heads).to(k_TKD.dtype)
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, self._value_norm.norm(v_TKD), batch.kv[self._cache], plan.slot_T)
        q_THD = clipped(q_TX.unflatten(1, (self._heads, -1)) * self._of_q_HD, of_heads)
        states_THR = states_TX.unflatten(1, (self._heads, -1)) * self._of_states_HR
        states_THR = clipped(states_THR, of_states)
        if self._growth is not None:
            growth_T11 = self._growth.factors(batch.positions_T)
            q_THD, states_THR = q_THD * growth_T11, states_THR * growth_T11
        handed = q_THD.to(q_TX.dtype), states_THR.contiguous(), gate_TX, sink_TH
        if at_N is None:
            return handed
        q, states, gate, sink = (one.index_select(0, at_N) for one in handed)
        return q, states, gate, sink

    def attend_into(
        self, handed: Handed, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        q_THD, states_THR, gate_TX, sink_TH = handed
        plan = batch.plans[batch.group_of_layer[self._cache]]
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan, lse_TH, states_THR)
        y_TX = (y_THD.float() * share_beside(sink_TH.float(), lse_TH)).flatten(
            1
        ) * gate_TX.float().sigmoid()
        return self._out.project_into(y_TX.to(y_THD.dtype), residual_TE)

    def _finish(self) -> None:
        attention, scope, spec = self._spec.attention, self._scope, self._spec
        self._of_q_HD, self._of_states_HR = self._of_q.take(), self._of_states.take()
        self._write = bind_kv_write(scope, kv_heads=self._kv_heads, head_dim=attention.head_dim)
        problem = replace(
            attention.problem(scope, heads=self._heads, kv_heads=self._kv_heads),
            bias_width=spec.extent,
            bias_rank=spec.rank,
        )
        self._attend = scope.bind(ATTENTION, problem, None, self._lines.take())


class TokenConv:
    """x_TC -> y_TC: ShortConv whose taps are those of a channel and those of a token and head
    together, both counted from the token backwards. Its cache is that of earlier inputs."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        parts: tuple[Part, Part],
        *,
        taps: int,
        names: tuple[str, str],
    ) -> None:
        self._taps = taps
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._sizes = [local_size(part, scope.mesh.tp) for part in parts]
        self._params = [
            scope.param(
                f"{name}.static_w",
                (taps, part.size),
                shard=Shard(axis="tp", dim=1, parts=(part,)),
                init="zeros",
                dtype=torch.float32,
            )
            for name, part in zip(names, parts, strict=True)
        ]
        self._own_HDW = torch.empty(0)
        self._before = EarlierInputs(scope, cache, sum(self._sizes), taps=taps)
        scope.on_finish(self._finish)

    @property
    def form(self) -> StateForm:
        """The last inputs of a row."""
        return self._before.form

    def apply(
        self,
        x_TC: torch.Tensor,
        taps: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        rows: ScanRows,
    ) -> torch.Tensor:
        """`taps`: [T, KW] of keys and of values."""
        taps_THW = torch.cat([one.unflatten(1, (self._heads, -1)) for one in taps], dim=1)
        weight_THDW = self._own_HDW + taps_THW.float()[:, :, None]
        x_THD = x_TC.float().unflatten(1, (2 * self._heads, -1))
        sum_THD = x_THD * (weight_THDW[..., 0] + 1.0)
        for lag, before_TC in enumerate(self._before.of(x_TC, batch, rows), 1):
            before_THD = before_TC.float().unflatten(1, (2 * self._heads, -1))
            sum_THD = sum_THD + before_THD * weight_THDW[..., lag]
        return (sum_THD * (2 * self._taps + 1) ** -0.5).flatten(1).to(x_TC.dtype)

    def _finish(self) -> None:
        own_WC = torch.cat([param.take() for param in self._params], dim=1)
        self._own_HDW = own_WC.t().unflatten(0, (2 * self._heads, -1)).contiguous()


def clipped(x: torch.Tensor, longest: float) -> torch.Tensor:
    """Vectors in float32, those that are longer made as long as this."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (longest / (length + 1e-6)).clamp(max=1.0)
