"""Lightning attention: linear attention of which each head forgets at a rate of its own (Qin et al.
2024, "Various lengths, constant speed", section 3; MiniMax-01, MiniMax 2025, section 2.2).

It is Mamba 2's recurrence with steps of 1: x is the value, b the key and c the query. T query
tokens, E hidden size, H heads of D; H is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units


@dataclass(frozen=True, kw_only=True)
class LightningSpec:
    """One layer, in global sizes. `slopes`: of each head, the state is multiplied by exp(-slope)
    per token. `activation`: of queries, keys and values."""

    width: int
    heads: int
    head_dim: int
    slopes: tuple[float, ...]
    activation: str
    eps: float

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Lightning:
        """See MixerSpec."""
        return Lightning(scope / "self_attn", cache, self, norm=norm, adds=adds)


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
        names = ("query", "key", "value", "output_gate")
        parts = tuple(Part(name, spec.heads * spec.head_dim, spec.heads) for name in names)
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._qkv = ColumnLinear(scope, spec.width, parts[:3], merged="qkv_proj", groups=spec.heads)
        self._gate = ColumnLinear(scope, spec.width, parts[3:])
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._gated_norm = GatedNorm(
            scope, parts[0], GatedNormSpec(eps=spec.eps, norm_first=True, gate="sigmoid")
        )
        self._out = RowLinear(scope / "out_proj", parts[0], spec.width, adds=adds)
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
        qkv_TC = self._activation.apply(self._qkv.project(x_TE))
        q_THD, k_THD, v_THD = qkv_TC.unflatten(1, (3, self._heads, -1)).unbind(1)
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
