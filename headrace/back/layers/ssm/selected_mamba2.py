"""Mamba 2's recurrence with Mamba 1's selection (PLaMo 2): time steps, B and C follow from what the
convolution gives, by one projection and a norm each; there is no norm behind the recurrence.

T query tokens, E hidden size, H heads of P channels, I = H * P, N state size, R rank of the time
steps; H and I are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import ONLY_GATE, GatedNorm
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units

SELECTED_NORMS = ("B_norm", "C_norm", "dt_norm")


@dataclass(frozen=True, kw_only=True)
class SelectedMamba2Spec:
    """One layer, in global sizes. `eps`: of the norms of B, C and time steps. `name`: the module in
    its layer."""

    width: int
    heads: int
    head_dim: int
    state_dim: int
    step_rank: int
    taps: int
    eps: float
    name: str = "mixer"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> SelectedMamba2:
        """See MixerSpec."""
        return SelectedMamba2(scope / self.name, cache, self, norm=norm, adds=adds)


class SelectedMamba2:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the recurrence [H, P, N], which is float32: it is a sum over all tokens so far."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: SelectedMamba2Spec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        inner = spec.heads * spec.head_dim
        gate, x = (Part(f"{name} of in_proj", inner, spec.heads) for name in ("gate", "x"))
        heads = Part("dt_proj", spec.heads, spec.heads)
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(heads, scope.mesh.tp)
        self._in = ColumnLinear(
            scope, spec.width, (gate, x), merged="in_proj", groups=spec.heads, norm=norm
        )
        self._conv = ShortConv(scope / "conv1d", cache, (x,), taps=spec.taps)
        self._split = (spec.state_dim, spec.state_dim, spec.step_rank)
        self._select = RowLinear(scope / "bcdt_proj", x, sum(self._split))
        self._norms = [
            RMS.build(scope / name, width, eps=spec.eps)
            for name, width in zip(SELECTED_NORMS, self._split, strict=True)
        ]
        self._steps = ColumnLinear(scope, spec.step_rank, (heads,))
        self._decay = wide_param(scope, "A_log", heads)
        self._step_bias = wide_param(scope, "dt_bias", heads)
        self._skip = wide_param(scope, "D", heads, init="ones")
        self._gate = GatedNorm(scope, x, ONLY_GATE)
        self._out = RowLinear(scope / "out_proj", x, spec.width, adds=adds)
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
        gate_TI, x_TI = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        x_TI = self._conv.apply(x_TI, batch, rows)
        selected = self._select.project(x_TI).split_with_sizes(self._split, dim=1)
        b_TN, c_TN, steps_TR = (
            norm.norm(part) for norm, part in zip(self._norms, selected, strict=True)
        )
        y_THP = self._scan(
            x_TI.unflatten(1, (-1, spec.head_dim)),
            self._steps.project(steps_TR),
            b_TN.unflatten(1, (1, -1)),
            c_TN.unflatten(1, (1, -1)),
            batch.kv[self._cache + 1],
            rows,
        )
        y_TI = y_THP.flatten(1)
        if at_N is not None:
            y_TI, gate_TI = y_TI.index_select(0, at_N), gate_TI.index_select(0, at_N)
        return self._gate.apply(y_TI, gate_TI)

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
            groups=1,
            head_dim=spec.head_dim,
            state_dim=spec.state_dim,
        )
        decay_H = -self._decay.take().exp()
        weights = decay_H, self._step_bias.take(), self._skip.take()
        self._scan = scope.bind(SSD_SCAN, problem, *weights)
