"""Griffin's recurrent layer (De et al. 2024, section 2.4): a short convolution, the real-gated
linear recurrent unit, a gate beside it.

T query tokens, E hidden size, H blocks of W channels, C = H * W; H and C are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_scan.op import OP as GATED_SCAN
from headrace.back.kernels.gated_scan.op import GatedScan, GatedScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import GatedNorm
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.layers.ssm.short_conv import PRODUCT
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part

STRENGTH = 8.0
"""Of the recurrence gate in the exponent, the paper's c."""
GATES = ("input_gate", "recurrent_gate")


@dataclass(frozen=True, kw_only=True)
class RgLruSpec:
    """One layer, in global sizes. `blocks`: of the gates' weights; `activation`: of the gate beside
    the recurrence. `name`: the module in its layer."""

    width: int
    channels: int
    blocks: int
    taps: int
    activation: str
    name: str = "temporal_block"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> RgLru:
        """See MixerSpec."""
        return RgLru(scope / self.name, cache, self, norm=norm, adds=adds)


class RgLru:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the recurrence [C] in float32."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: RgLruSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        gate, x = (Part(name, spec.channels, spec.blocks) for name in ("linear_y", "linear_x"))
        block = spec.channels // spec.blocks
        blocks = Part("blocks", spec.blocks, spec.blocks)
        unit = scope / "rg_lru"
        self._scope, self._cache, self._block = scope, cache, block
        self._in = ColumnLinear(scope, spec.width, (gate, x), bias=True, norm=norm)
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._conv = ShortConv(
            scope / "conv_1d", cache, (x,), taps=spec.taps, bias=True, activation=""
        )
        self._gates = [
            (
                wide_param(unit, f"{name}_weight", blocks, block, block, init="normal"),
                wide_param(unit, f"{name}_bias", blocks, block),
            )
            for name in GATES
        ]
        self._decay = wide_param(unit, "recurrent_param", x)
        self._product = GatedNorm(scope, x, PRODUCT)
        self._out = RowLinear(scope / "linear_out", x, spec.width, bias=True, adds=adds)
        self._weight_HWX = self._bias_H1X = self._decay_C = torch.empty(0)
        self._scan: GatedScan = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return self._conv.forms_before(self._in.sizes[1])

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, of the tokens `at_N`, None: of all."""
        rows = scan_rows(batch, self._cache)
        gate_TC, x_TC = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        x_TC = self._conv.apply(x_TC, batch, rows)
        keep_TC, in_TC = self._gated(x_TC, batch.positions_T)
        y_TC = self._scan(keep_TC, in_TC, batch.kv[self._cache + 1], rows).to(x_TC.dtype)
        if at_N is not None:
            y_TC, gate_TC = y_TC.index_select(0, at_N), gate_TC.index_select(0, at_N)
        return self._product.apply(y_TC, self._activation.apply(gate_TC.contiguous()))

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _gated(
        self, x_TC: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of the state stays, and what a scan whose inputs weigh as much as goes has to be
        given; both float32. A text's first token finds no state."""
        wide_TC = x_TC.float()
        x_HTW = wide_TC.unflatten(1, (-1, self._block)).transpose(0, 1)
        gates_HTX = torch.baddbmm(self._bias_H1X, x_HTW, self._weight_HWX).sigmoid()
        gate_TC, decay_TC = (part.transpose(0, 1).flatten(1) for part in gates_HTX.chunk(2, dim=2))
        log_TC = decay_TC * self._decay_C
        first_T1 = (positions_T == 0)[:, None]
        keep_TC = log_TC.exp().masked_fill(first_T1, 0.0)
        taken_TC = (1 - (2 * log_TC).exp()).sqrt().masked_fill(first_T1, 1.0)
        gone_TC = (1 - keep_TC).clamp_min(torch.finfo(torch.float32).tiny)
        return keep_TC, wide_TC * gate_TC * taken_TC / gone_TC

    def _finish(self) -> None:
        weights, biases = zip(*self._gates, strict=True)
        self._weight_HWX = torch.cat([weight.take() for weight in weights], dim=2)
        self._bias_H1X = torch.cat([bias.take() for bias in biases], dim=1)[:, None]
        self._decay_C = -STRENGTH * F.softplus(self._decay.take())
        problem = GatedScanProblem(device=self._scope.kind)
        self._scan = self._scope.bind(GATED_SCAN, problem)
