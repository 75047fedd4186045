"""RWKV 4's two branches (Peng et al. 2023, "RWKV", section 3): both read each token beside the one
before it; time mixing averages the values of all tokens so far, channel mixing is an MLP with a
gate.

T query tokens, E hidden size, C channels; C is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.causal_conv.op import OP as CAUSAL_CONV
from headrace.back.kernels.causal_conv.op import CausalConv, CausalConvProblem
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.wkv.op import OP as WKV
from headrace.back.kernels.wkv.op import Wkv, WkvProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import scan_rows, wide_param
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_size

TIME, CHANNEL = ("key", "value", "receptance"), ("key", "receptance")


@dataclass(frozen=True, kw_only=True)
class TimeMixSpec:
    """One branch, in global sizes. `channels`: of the average."""

    width: int
    channels: int
    name: str = "attention"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> TimeMix:
        """See MixerSpec."""
        return TimeMix(scope / self.name, cache, self, adds=adds)


@dataclass(frozen=True, kw_only=True)
class ChannelMixSpec:
    """One branch, in global sizes."""

    width: int
    inner: int
    name: str = "feed_forward"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ChannelMix:
        """See MixerSpec."""
        return ChannelMix(scope / self.name, cache, self)


class TokenShift:
    """x_TE -> one x_TE for each name: w * x + (1 - w) * the x before it, with weights of its own.
    Its cache, `form`, is a row's last x."""

    def __init__(self, scope: Scope, cache: int, width: int, names: tuple[str, ...]) -> None:
        self._scope, self._cache, self._width = scope, cache, width
        self._weights = [
            scope.param(f"time_mix_{name}", (1, 1, width), dtype=torch.float32) for name in names
        ]
        self._conv: CausalConv = not_loaded
        scope.on_finish(self._finish)

    @property
    def form(self) -> StateForm:
        """See the class."""
        return StateForm(cache=self._cache, shape=(1, len(self._weights) * self._width))

    def of(self, x_TE: torch.Tensor, batch: Batch, rows: ScanRows) -> tuple[torch.Tensor, ...]:
        """See the class."""
        many_TC = x_TE.repeat(1, len(self._weights))
        return self._conv(many_TC, batch.kv[self._cache], rows).split(self._width, dim=1)

    def _finish(self) -> None:
        now_C = torch.cat([weight.take().flatten() for weight in self._weights])
        problem = CausalConvProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            channels=now_C.shape[0],
            taps=2,
            activation="",
        )
        self._conv = self._scope.bind(CAUSAL_CONV, problem, torch.stack((1 - now_C, now_C)), None)


class TimeMix:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the last x and op wkv's state."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: TimeMixSpec, *, adds: bool) -> None:
        parts = [Part(name, spec.channels, spec.channels) for name in TIME]
        self._scope, self._cache = scope, cache
        self._channels = local_size(parts[0], scope.mesh.tp)
        self._shift = TokenShift(scope, cache, spec.width, TIME)
        self._projections = [ColumnLinear(scope, spec.width, (part,)) for part in parts]
        self._weights = [wide_param(scope, f"time_{name}", parts[0]) for name in ("decay", "first")]
        self._out = RowLinear(scope / "output", parts[0], spec.width, adds=adds)
        self._average: Wkv = not_loaded
        self._gate: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        shape = (3, self._channels)
        state = StateForm(cache=self._cache + 1, shape=shape, dtype=torch.float32)
        return (self._shift.form, state)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, C], of the tokens `at_N`, None: of all."""
        rows = scan_rows(batch, self._cache)
        k_TC, v_TC, gate_TC = (
            linear.project(part_TE.contiguous())
            for linear, part_TE in zip(
                self._projections, self._shift.of(x_TE, batch, rows), strict=True
            )
        )
        y_TC = self._average(k_TC, v_TC, batch.kv[self._cache + 1], rows)
        y_TC = self._gate(y_TC, gate_TC)
        return y_TC if at_N is None else y_TC.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _finish(self) -> None:
        decay_C, first_C = (weight.take() for weight in self._weights)
        facts = {"device": self._scope.kind, "dtype": self._scope.dtype}
        problem = WkvProblem(**facts, channels=self._channels)
        self._average = self._scope.bind(WKV, problem, decay_C.exp(), first_C)
        self._gate = sigmoid_gate(self._scope, self._channels)


class ChannelMix:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its cache is the last x. What it hands on is the
    inner values beside the gate, which every rank has whole."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: ChannelMixSpec) -> None:
        inner = Part("key", spec.inner, spec.inner)
        self._scope, self._cache, self._width = scope, cache, spec.width
        self._shift = TokenShift(scope, cache, spec.width, CHANNEL)
        self._key = ColumnLinear(scope, spec.width, (inner,))
        self._activation = ElementwiseActivation(scope, "relu2")
        self._receptance = WholeLinear(scope / "receptance", spec.width, spec.width)
        self._value = RowLinear(scope / "value", inner, spec.width)
        self._gate: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return (self._shift.form,)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(inner_TC, gate_TE), of the tokens `at_N`, None: of all."""
        key_TE, gate_TE = self._shift.of(x_TE, batch, scan_rows(batch, self._cache))
        if at_N is not None:
            key_TE, gate_TE = key_TE.index_select(0, at_N), gate_TE.index_select(0, at_N)
        inner_TC = self._activation.apply(self._key.project(key_TE.contiguous()))
        return inner_TC, self._receptance.project(gate_TE.contiguous())

    def attend_into(
        self, handed: tuple[torch.Tensor, torch.Tensor], residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual."""
        inner_TC, gate_TE = handed
        return self._gate(self._value.project(inner_TC), gate_TE)

    def _finish(self) -> None:
        self._gate = sigmoid_gate(self._scope, self._width)


def sigmoid_gate(scope: Scope, width: int) -> GatedNorm:
    """(y_TW, gate_TW) -> y times the gate's sigmoid."""
    problem = GatedNormProblem(
        device=scope.kind, dtype=scope.dtype, width=width, group=0, gate="sigmoid"
    )
    return scope.bind(GATED_NORM, problem, None)
