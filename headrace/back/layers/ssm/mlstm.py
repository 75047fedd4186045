"""xLSTM's layer with a matrix for a memory (Beck et al. 2024, section 2.3; Beck et al. 2025, "xLSTM
7B").

It is Mamba 2's recurrence: the forget gate is what a step keeps, x is the value times exp(input
gate), b the key and c the query; a value of 1 beside each gives the normalizer. Gates are capped
and what is kept is below 1, so that float32 holds all sums as they are.

T query tokens, E hidden size, H heads of K for keys and V for values; H is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScan, SsdScanProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import HeadsLayerNorm, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units

LEAST_STEP = 1e-30
"""Of the logarithm of what is kept, which the input is divided by."""
SIGMOID_GATE = GatedNormSpec(groups=0, gate="sigmoid")


@dataclass(frozen=True, kw_only=True)
class MLstmSpec:
    """One layer, in global sizes. `cap`: of both gates. `name`: the module in its layer."""

    width: int
    heads: int
    key_dim: int
    value_dim: int
    cap: float
    eps: float
    name: str = "mlstm_layer"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> MLstm:
        """See MixerSpec."""
        return MLstm(scope / self.name, cache, self, norm=norm, adds=adds)


class MLstm:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its cache is the memory [H, V + 1, K] in
    float32, the normalizer behind the values."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: MLstmSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        sizes = (spec.key_dim, spec.key_dim, spec.value_dim, spec.value_dim)
        names = ("q", "k", "v", "ogate_preact")
        parts = tuple(
            Part(name, spec.heads * size, spec.heads)
            for name, size in zip(names, sizes, strict=True)
        )
        gates = tuple(Part(f"{name}gate_preact", spec.heads, spec.heads) for name in "if")
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._in = ColumnLinear(scope, spec.width, parts)
        self._gates = ColumnLinear(scope, spec.width, gates, bias=True)
        values = parts[2]
        self._norm = HeadsLayerNorm(scope / "multihead_norm", values, eps=spec.eps, flat=True)
        self._gate = GatedNorm(scope, values, SIGMOID_GATE)
        self._out = RowLinear(scope / "out_proj", values, spec.width, adds=adds)
        self._scan: SsdScan = not_loaded
        scope.on_finish(self._finish)

    @property
    def norms(self) -> bool:
        """Both projections read what the norm gives."""
        return False

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        shape = (self._heads, self._spec.value_dim + 1, self._spec.key_dim)
        return (StateForm(cache=self._cache, shape=shape, dtype=torch.float32),)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, H * V], of the tokens `at_N`, None: of all."""
        spec = self._spec
        q_TX, k_TX, v_TX, open_TX = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        gates_TX = self._gates.project(x_TE).float()
        in_TH, forget_TH = (torch.tanh(gates_TX / spec.cap) * spec.cap).chunk(2, dim=1)
        q_THK, k_THK = (part.float().unflatten(1, (-1, spec.key_dim)) for part in (q_TX, k_TX))
        values_THV = F.pad(v_TX.float().unflatten(1, (-1, spec.value_dim)), (0, 1), value=1.0)
        step_TH = F.softplus(-forget_TH).clamp_min(LEAST_STEP)
        y_THV = self._scan(
            values_THV * (in_TH.exp() / step_TH)[..., None],
            -forget_TH,
            k_THK.contiguous(),
            (q_THK * spec.key_dim**-0.5).contiguous(),
            batch.kv[self._cache],
            scan_rows(batch, self._cache),
        )
        if at_N is not None:
            y_THV, open_TX = y_THV.index_select(0, at_N), open_TX.index_select(0, at_N)
        sums_THV, weight_TH1 = y_THV.split_with_sizes((spec.value_dim, 1), dim=2)
        read_THV = (sums_THV / weight_TH1.abs().clamp_min(1.0)).to(open_TX.dtype)
        return self._gate.apply(self._norm.norm(read_THV).flatten(1), open_TX)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        problem = SsdScanProblem(
            device=scope.kind,
            dtype=torch.float32,
            heads=self._heads,
            groups=self._heads,
            head_dim=spec.value_dim + 1,
            state_dim=spec.key_dim,
        )
        zeros_H = torch.zeros(self._heads, dtype=torch.float32, device=scope.device)
        self._scan = scope.bind(SSD_SCAN, problem, zeros_H - 1, zeros_H, zeros_H)
