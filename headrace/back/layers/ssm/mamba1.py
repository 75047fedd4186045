"""Mamba's layer (Gu and Dao 2023, section 3.4): a short convolution, the selective scan, a gate.

T query tokens, E hidden size, I inner channels, N state size, R rank of the time steps; I is this
rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.selective_scan.op import OP as SELECTIVE_SCAN
from headrace.back.kernels.selective_scan.op import SelectiveScan, SelectiveScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import NormSpec, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_size

INNER_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True, kw_only=True)
class Mamba1Spec:
    """One layer, in global sizes. `norm`: that of time steps, b and c before the scan, each with
    `eps`; None: there are none. `name`: the module in its layer."""

    width: int
    inner: int
    state_dim: int
    step_rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norm: NormSpec | None = None
    eps: float = 0.0
    name: str = "mixer"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Mamba1:
        """See MixerSpec."""
        return Mamba1(scope / self.name, cache, self, norm=norm, adds=adds)


class Mamba1:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the scan [I, N], which is float32: it is a sum over all tokens so far."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: Mamba1Spec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        x, gate = (Part(f"{name} of in_proj", spec.inner, spec.inner) for name in ("x", "gate"))
        self._scope, self._spec, self._cache = scope, spec, cache
        self._width = local_size(x, scope.mesh.tp)
        self._in = ColumnLinear(
            scope, spec.width, (x, gate), bias=spec.bias, merged="in_proj", norm=norm
        )
        self._conv = ShortConv(scope / "conv1d", cache, (x,), taps=spec.taps, bias=spec.conv_bias)
        self._split = (spec.step_rank, spec.state_dim, spec.state_dim)
        self._select = RowLinear(scope / "x_proj", x, sum(self._split))
        self._norms = [
            spec.norm.build(scope / name, width, eps=spec.eps)
            for name, width in zip(INNER_NORMS, self._split, strict=True)
            if spec.norm is not None
        ]
        steps = Part("dt_proj", spec.inner, spec.inner)
        self._steps = ColumnLinear(scope, spec.step_rank, (steps,))
        self._step_bias = wide_param(scope / "dt_proj", "bias", x)
        self._decay = wide_param(scope, "A_log", x, spec.state_dim)
        self._skip = wide_param(scope, "D", x, init="ones")
        self._out = RowLinear(scope / "out_proj", x, spec.width, bias=spec.bias, adds=adds)
        self._scan: SelectiveScan = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return self._conv.forms_before(self._width, self._spec.state_dim)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, I] or [N, I]."""
        rows = scan_rows(batch, self._cache)
        x_TI, gate_TI = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        x_TI = self._conv.apply(x_TI, batch, rows)
        selected = self._select.project(x_TI).split_with_sizes(self._split, dim=1)
        if self._norms:
            selected = [norm.norm(x) for norm, x in zip(self._norms, selected, strict=True)]
        steps_TR, b_TN, c_TN = selected
        steps_TI, state = self._steps.project(steps_TR), batch.kv[self._cache + 1]
        y_TI = self._gated(x_TI, steps_TI, b_TN, c_TN, gate_TI, state, rows)
        return y_TI if at_N is None else y_TI.index_select(0, at_N)

    def _gated(
        self,
        x_TI: torch.Tensor,
        steps_TI: torch.Tensor,
        b_TN: torch.Tensor,
        c_TN: torch.Tensor,
        gate_TI: torch.Tensor,
        state: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        """What the scan gives, times the gate."""
        return self._scan(x_TI, steps_TI, b_TN, c_TN, gate_TI, state, rows)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        scope = self._scope
        problem = SelectiveScanProblem(
            device=scope.kind,
            dtype=scope.dtype,
            channels=self._width,
            state_dim=self._spec.state_dim,
        )
        decay_IN = -self._decay.take().exp()
        weights = decay_IN, self._step_bias.take(), self._skip.take()
        self._scan = scope.bind(SELECTIVE_SCAN, problem, *weights)
