"""Mamba 2's layer (Dao and Gu 2024, section 7): a short convolution, the recurrence of state space
duality, a gated norm.

T query tokens, E hidden size, H heads of P channels, I = H * P, G groups, N state size; H, I and G
are this rank's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import ONLY_GATE, GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """One layer, in global sizes. `limits`: of the time step; `norm`: ONLY_GATE has none; `scales`:
    what gate, x, B, C and time steps are multiplied with, `out_scale`: the weight that leads back;
    `name`: the module in its layer."""

    width: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    taps: int
    limits: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True
    norm: GatedNormSpec = ONLY_GATE
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0
    name: str = "mixer"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Mamba2:
        """See MixerSpec."""
        return Mamba2(scope / self.name, cache, self, norm=norm, adds=adds)


class Mamba2:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the recurrence [H, P, N], which is float32: it is a sum over all tokens so far."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: Mamba2Spec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        inner, states = spec.heads * spec.head_dim, spec.groups * spec.state_dim
        units = (("gate", inner, spec.heads), ("x", inner, spec.heads))
        units += (("B", states, spec.groups), ("C", states, spec.groups))
        units += (("heads", spec.heads, spec.heads),)
        gate, x, b, c, heads = (
            Part(f"{name} of in_proj", size, count, scale=scale)
            for (name, size, count), scale in zip(units, spec.scales, strict=True)
        )
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads, self._groups = (local_units(part, scope.mesh.tp) for part in (x, b))
        self._in = ColumnLinear(
            scope, spec.width, (gate, x, b, c, heads), bias=spec.bias, merged="in_proj", norm=norm
        )
        self._conv = ShortConv(
            scope / "conv1d", cache, (x, b, c), taps=spec.taps, bias=spec.conv_bias
        )
        self._decay = wide_param(scope, "A_log", heads)
        self._step_bias = wide_param(scope, "dt_bias", heads)
        self._skip = wide_param(scope, "D", heads, init="ones")
        self._gated_norm = GatedNorm(scope, x, spec.norm)
        self._out = RowLinear(
            scope / "out_proj", x, spec.width, bias=spec.bias, adds=adds, scale=spec.out_scale
        )
        self._scan: SsdScan = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return self._conv.forms_before(self._heads, self._spec.head_dim, self._spec.state_dim)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, I] or [N, I]."""
        rows, spec = scan_rows(batch, self._cache), self._spec
        gate_size, *conv_sizes, dt_size = self._in.sizes
        split = (gate_size, sum(conv_sizes), dt_size)
        gate_TI, xbc_TC, dt_TH = self._in.project(x_TE).split_with_sizes(split, dim=1)
        xbc_TC = self._conv.apply(xbc_TC, batch, rows)
        x_TI, b_TX, c_TX = xbc_TC.split_with_sizes(conv_sizes, dim=1)
        y_THP = self._scan(
            x_TI.unflatten(1, (-1, spec.head_dim)),
            dt_TH,
            b_TX.unflatten(1, (-1, spec.state_dim)),
            c_TX.unflatten(1, (-1, spec.state_dim)),
            batch.kv[self._cache + 1],
            rows,
        )
        y_TI = y_THP.flatten(1)
        if at_N is not None:
            y_TI, gate_TI = y_TI.index_select(0, at_N), gate_TI.index_select(0, at_N)
        return self._gated_norm.apply(y_TI, gate_TI)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        problem = SsdScanProblem(
            device=scope.kind,
            dtype=scope.dtype,
            heads=self._heads,
            groups=self._groups,
            head_dim=spec.head_dim,
            state_dim=spec.state_dim,
            limits=spec.limits,
        )
        decay_H = -self._decay.take().exp()
        weights = decay_H, self._step_bias.take(), self._skip.take()
        self._scan = scope.bind(SSD_SCAN, problem, *weights)
