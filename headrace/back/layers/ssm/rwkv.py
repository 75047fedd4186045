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
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.wkv.op import OP as WKV
from headrace.back.kernels.wkv.op import Wkv, WkvProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import scan_rows, wide_param
from headrace.back.layers.ssm.token_shift import TokenShift, TokenShiftSpec
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_size

TIME = ("key", "value", "receptance")
CHANNEL = TokenShiftSpec(names=("time_mix_key", "time_mix_receptance"), of_token=True)


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
    """One branch, in global sizes. `shift`: its one or two results, for the key and, where there is
    one, for the gate."""

    width: int
    inner: int
    name: str = "feed_forward"
    shift: TokenShiftSpec = CHANNEL

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ChannelMix:
        """See MixerSpec."""
        return ChannelMix(scope / self.name, cache, self)


class TimeMix:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the last x and op wkv's state."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: TimeMixSpec, *, adds: bool) -> None:
        parts = [Part(name, spec.channels, spec.channels) for name in TIME]
        self._scope, self._cache = scope, cache
        self._channels = local_size(parts[0], scope.mesh.tp)
        shift = TokenShiftSpec(names=tuple(f"time_mix_{name}" for name in TIME), of_token=True)
        self._shift = TokenShift(scope, cache, spec.width, shift)
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
            linear.project(part_TE)
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
    inner values beside the gate, if there is one, which every rank has whole."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: ChannelMixSpec) -> None:
        inner = Part("key", spec.inner, spec.inner)
        self._scope, self._cache, self._width = scope, cache, spec.width
        self._shift = TokenShift(scope, cache, spec.width, spec.shift)
        self._key = ColumnLinear(scope, spec.width, (inner,))
        self._activation = ElementwiseActivation(scope, "relu2")
        self._receptance = None
        if len(spec.shift.names) > 1:
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(inner_TC, gate_TE), of the tokens `at_N`, None: of all."""
        shifted = self._shift.of(x_TE, batch, scan_rows(batch, self._cache))
        if at_N is not None:
            shifted = tuple(one.index_select(0, at_N) for one in shifted)
        inner_TC = self._activation.apply(self._key.project(shifted[0]))
        return inner_TC, self._receptance and self._receptance.project(shifted[1])

    def attend_into(
        self,
        handed: tuple[torch.Tensor, torch.Tensor | None],
        residual_TE: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual."""
        inner_TC, gate_TE = handed
        y_TE = self._value.project(inner_TC)
        return y_TE if gate_TE is None else self._gate(y_TE, gate_TE)

    def _finish(self) -> None:
        if self._receptance is not None:
            self._gate = sigmoid_gate(self._scope, self._width)


def sigmoid_gate(scope: Scope, width: int) -> GatedNorm:
    """(y_TW, gate_TW) -> y times the gate's sigmoid."""
    problem = GatedNormProblem(
        device=scope.kind, dtype=scope.dtype, width=width, group=0, gate="sigmoid"
    )
    return scope.bind(GATED_NORM, problem, None)
