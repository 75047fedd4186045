"""A scan whose results layers above read through gates of their own: gated memory units (Ren et al.
2025, "Decoder-hybrid-decoder architecture", section 2; SambaY).

T query tokens, E hidden size, I inner channels of this rank, N state size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.mamba1 import Mamba1, Mamba1Spec
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part

OPEN = 32.0
"""A gate whose sigmoid is 1 in float32: the scan's results times a power of two, which is exact."""


class ScanMemory:
    """What the scan of the last step gave, y_TI before its gate; it is there from that layer on
    until the step ends. One step runs at a time."""

    def __init__(self) -> None:
        self.y_TI = torch.empty(0)

    def keep(self, at_N: torch.Tensor | None) -> None:
        """The step goes on with these tokens alone; None: with all."""
        if at_N is not None:
            self.y_TI = self.y_TI.index_select(0, at_N)


@dataclass(frozen=True, kw_only=True)
class RememberedMamba1Spec:
    """A layer of Mamba whose scan `memory` holds."""

    mamba: Mamba1Spec
    memory: ScanMemory

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> RememberedMamba1:
        """See MixerSpec."""
        place = scope / self.mamba.name
        return RememberedMamba1(place, cache, self.mamba, self.memory, norm=norm, adds=adds)


class RememberedMamba1(Mamba1):
    """See RememberedMamba1Spec."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: Mamba1Spec,
        memory: ScanMemory,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        super().__init__(scope, cache, spec, norm=norm, adds=adds)
        self._memory = memory

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
        wide_TI = torch.full_like(steps_TI, OPEN)
        y_TI = self._scan(x_TI, steps_TI, b_TN, c_TN, wide_TI, state, rows) / OPEN
        self._memory.y_TI = y_TI
        return y_TI * F.silu(gate_TI)


@dataclass(frozen=True, kw_only=True)
class MemoryGateSpec:
    """Reads a `memory` of `inner` channels. `name`: its module in the layer."""

    width: int
    inner: int
    memory: ScanMemory
    bias: bool = False
    name: str = "mixer"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> MemoryGate:
        """See MixerSpec."""
        return MemoryGate(scope / self.name, self, norm=norm, adds=adds)


class MemoryGate:
    """x_TE -> y_TE, the memory times the activation of a projection of x, projected back: see
    Mixer. `scope` is its own."""

    probed = False
    kv_forms: tuple[CacheForm, ...] = ()

    def __init__(
        self, scope: Scope, spec: MemoryGateSpec, *, norm: RMSNorm | None, adds: bool
    ) -> None:
        part = Part("in_proj", spec.inner, spec.inner)
        self._memory = spec.memory
        self._in = ColumnLinear(scope, spec.width, (part,), bias=spec.bias, norm=norm)
        self._out = RowLinear(scope / "out_proj", part, spec.width, bias=spec.bias, adds=adds)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, I] or [N, I]."""
        y_TI = self._memory.y_TI * F.silu(self._in.project(x_TE))
        return y_TI if at_N is None else y_TI.index_select(0, at_N)

    def attend_into(
        self, y_TI: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(y_TI, residual_TE)
