"""Mamba's layer in heads, each of which selects for itself (Glorioso et al. 2024, "Zamba"): time
steps, b and c of a head follow from its own channels.

T query tokens, E hidden size, H heads of P channels, I = H * P, N state size, R rank of the time
steps; H and I are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.selective_scan.op import OP as SELECTIVE_SCAN
from headrace.back.kernels.selective_scan.op import SelectiveScan, SelectiveScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_units


@dataclass(frozen=True, kw_only=True)
class MambaHeadsSpec:
    """One layer, in global sizes. `name`: the module in its layer."""

    width: int
    heads: int
    head_dim: int
    state_dim: int
    step_rank: int
    taps: int
    name: str
    bias: bool = False
    conv_bias: bool = True

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> MambaHeads:
        """See MixerSpec."""
        return MambaHeads(scope / self.name, cache, self, norm=norm, adds=adds)


class MambaHeads:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the scans [H, P, N] in float32."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: MambaHeadsSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        inner, heads = spec.heads * spec.head_dim, Part("heads", spec.heads, spec.heads)
        pairs = Part("x and gate of in_proj", 2 * inner, spec.heads)
        x = Part("x of in_proj", inner, spec.heads)
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(heads, scope.mesh.tp)
        self._in = ColumnLinear(
            scope, spec.width, (pairs,), bias=spec.bias, merged="in_proj", norm=norm
        )
        self._conv = ShortConv(scope / "conv1d", cache, (x,), taps=spec.taps, bias=spec.conv_bias)
        shard, rank = Shard(axis="tp", dim=0, parts=(heads,)), spec.step_rank
        self._split = (rank, spec.state_dim, spec.state_dim)
        self._select = scope.param(
            "x_proj_weight", (spec.heads, sum(self._split), spec.head_dim), shard=shard
        )
        self._steps = scope.param("dt_proj_weight", (spec.heads, spec.head_dim, rank), shard=shard)
        self._wide = [
            wide_param(scope, "A_log", heads, spec.head_dim, spec.state_dim),
            wide_param(scope, "dt_proj_bias", heads, spec.head_dim),
            wide_param(scope, "D", heads, spec.head_dim, init="ones"),
        ]
        self._out = RowLinear(scope / "out_proj", x, spec.width, bias=spec.bias, adds=adds)
        self._select_HPX = self._steps_HRP = torch.empty(0)
        self._scans: list[SelectiveScan] = []
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
        """What the output projection reads, [T, I] or [N, I]. The input's projection has each
        channel's gate behind it."""
        rows, state_MHPN = scan_rows(batch, self._cache), batch.kv[self._cache + 1]
        x_TI, gate_TI = self._in.project(x_TE).unflatten(1, (-1, 2)).unbind(2)
        x_TI = self._conv.apply(x_TI.contiguous(), batch, rows)
        x_HTP, gate_HTP = (
            part.unflatten(1, (self._heads, -1)).transpose(0, 1).contiguous()
            for part in (x_TI, gate_TI)
        )
        selected_HTX = torch.bmm(x_HTP, self._select_HPX)
        steps_HTR, b_HTN, c_HTN = selected_HTX.split_with_sizes(self._split, dim=2)
        steps_HTP = torch.bmm(steps_HTR, self._steps_HRP)
        y_TI = torch.cat(
            [
                scan(*inputs, state_MHPN[:, head], rows)
                for head, (scan, *inputs) in enumerate(
                    zip(self._scans, x_HTP, steps_HTP, b_HTN, c_HTN, gate_HTP, strict=True)
                )
            ],
            dim=1,
        )
        return y_TI if at_N is None else y_TI.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        self._select_HPX = self._select.take().transpose(1, 2).contiguous()
        self._steps_HRP = self._steps.take().transpose(1, 2).contiguous()
        problem = SelectiveScanProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            channels=self._spec.head_dim,
            state_dim=self._spec.state_dim,
        )
        decay_HPN, bias_HP, skip_HP = (param.take() for param in self._wide)
        decay_HPN = -decay_HPN.exp()
        self._scans = [
            self._scope.bind(SELECTIVE_SCAN, problem, *weights)
            for weights in zip(decay_HPN, bias_HP, skip_HP, strict=True)
        ]
