"""Lightning attention: linear attention of which each head forgets at a rate of its own (Qin et al.
2024, "Various lengths, constant speed", section 3; MiniMax-01, MiniMax 2025, section 2.2).

It is Mamba 2's recurrence with steps of 1: x is the value, b the key and c the query. T query
tokens, E hidden size, H heads of D; H is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.qk_norm import HeadNorm, QKNorm
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units


@dataclass(frozen=True, kw_only=True)
class LightningNames:
    """Where a layer's tensors lie. `merged` holds queries, keys and values, head by head if
    `by_head`, else one after the other."""

    module: str = "self_attn"
    merged: str = "qkv_proj"
    by_head: bool = True
    gate: str = "output_gate"
    out: str = "out_proj"


@dataclass(frozen=True, kw_only=True)
class LightningSpec:
    """One layer, in global sizes. `slopes`: of each head, the state is multiplied by exp(-slope)
    per token. `activation`: of queries, keys and values, None: there is none. `scale`: of what the
    state gives; `norm`: behind it, with its gate. `qk_norm`, `rope`: of queries and keys, None:
    there is none."""

    width: int
    heads: int
    head_dim: int
    slopes: tuple[float, ...]
    norm: GatedNormSpec
    activation: str | None = None
    scale: float = 1.0
    qk_norm: QKNorm | None = None
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    names: LightningNames = LightningNames()

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Lightning:
        """See MixerSpec."""
        return Lightning(scope / self.names.module, cache, self, norm=norm, adds=adds)


class Lightning:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its cache is the state of the recurrence
    [H, D, D] in float32, values before keys."""

    norms = probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: LightningSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        names = spec.names
        labels = ("query", "key", "value", names.gate)
        parts = tuple(Part(label, spec.heads * spec.head_dim, spec.heads) for label in labels)
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._qkv = ColumnLinear(
            scope,
            spec.width,
            parts[:3],
            bias=spec.qkv_bias,
            merged=names.merged,
            groups=spec.heads if names.by_head else 1,
        )
        self._gate = ColumnLinear(scope, spec.width, parts[3:])
        self._activation = None
        if spec.activation is not None:
            self._activation = ElementwiseActivation(scope, spec.activation)
        self._qk_norms: list[HeadNorm] = []
        if spec.qk_norm is not None:
            named = zip(spec.qk_norm.names, parts[:2], strict=True)
            self._qk_norms = [spec.qk_norm.build(scope / name, part) for name, part in named]
        self._rope = Rope(scope, spec.rope) if spec.rope else None
        # Of a norm, a factor of all that goes in is a divisor of its epsilon.
        gated = replace(spec.norm, eps=spec.norm.eps / spec.scale**2)
        self._gated_norm = GatedNorm(scope, parts[0], gated)
        self._out = RowLinear(
            scope / names.out, parts[0], spec.width, bias=spec.out_bias, adds=adds
        )
        self._scan: SsdScan = not_loaded
        self._steps_1H = torch.empty(0)
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        shape = (self._heads, self._spec.head_dim, self._spec.head_dim)
        return (StateForm(cache=self._cache, shape=shape, dtype=torch.float32),)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, H * D], of the tokens `at_N`, None: of all."""
        qkv_TC = self._qkv.project(x_TE)
        if self._activation is not None:
            qkv_TC = self._activation.apply(qkv_TC)
        q_THD, k_THD, v_THD = qkv_TC.unflatten(1, (3, self._heads, -1)).unbind(1)
        if self._qk_norms:
            of_q, of_k = self._qk_norms
            q_THD, k_THD = of_q.norm(q_THD), of_k.norm(k_THD)
        if self._rope is not None:
            self._rope.rotate(q_THD, k_THD, batch.positions_T, self._rope.table_PR)
        steps_TH = self._steps_1H.expand(x_TE.shape[0], -1)
        rows = scan_rows(batch, self._cache)
        y_THD = self._scan(v_THD, steps_TH, k_THD, q_THD, batch.kv[self._cache], rows)
        y_TX = self._gated_norm.apply(y_THD.flatten(1), self._gate.project(x_TE))
        return y_TX if at_N is None else y_TX.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        scope, spec, heads = self._scope, self._spec, self._spec.heads
        problem = SsdScanProblem(
            device=scope.kind,
            dtype=scope.dtype,
            heads=self._heads,
            groups=self._heads,
            head_dim=spec.head_dim,
            state_dim=spec.head_dim,
            limits=(1.0, 1.0),
        )
        (span,) = Shard(axis="tp", dim=0, parts=(Part("heads", heads, heads),)).spans(scope.mesh.tp)
        slopes = spec.slopes[span.start : span.start + span.size]
        decay_H = -torch.tensor(slopes, dtype=torch.float32, device=scope.device)
        zeros_H = torch.zeros_like(decay_H)
        self._steps_1H = zeros_H.to(scope.dtype)[None]
        self._scan = scope.bind(SSD_SCAN, problem, decay_H, zeros_H, zeros_H)
