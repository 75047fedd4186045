"""RWKV 7's time mixing (Peng et al. 2025, "RWKV-7 Goose", section 4.1): each token beside the one
before it, projections of low rank that decide on decay, rate, value and gate, the recurrence with
its norm (op wkv7), a gate.

T query tokens, E hidden size, H heads of D, C = H * D; H is this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.wkv7.op import OP as WKV7
from headrace.back.kernels.wkv7.op import Wkv7, Wkv7Problem
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import scan_rows, wide_param
from headrace.back.layers.ssm.token_shift import TokenShift, TokenShiftSpec
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, local_units


class FirstValues:
    """The values of the first layer [T, C] while a step passes the layers: one for each model,
    which its layers share."""

    def __init__(self) -> None:
        self.v_TC: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LowRanks:
    """Inner sizes of the projections that decide on what they are named after; a `gate` of 0:
    there is none."""

    decay: int
    rate: int
    value: int
    gate: int


@dataclass(frozen=True, kw_only=True)
class TimeMix7Spec:
    """One layer, in global sizes. `values`: those of the first layer, which the layer leaves there
    if it is `first` and else mixes its own with; the `last` one forgets them. `eps`: of the norm
    of heads, None: there is none. `flat_bonus`: its weight is [H * D], else [H, D]. `name`: the
    module in its layer."""

    width: int
    heads: int
    head_dim: int
    ranks: LowRanks
    eps: float | None
    first: bool
    last: bool
    values: FirstValues = field(compare=False)
    flat_bonus: bool = False
    name: str = "attn"

    @property
    def shift(self) -> TokenShiftSpec:
        """In the order of receptance, decay, key, value, rate and gate."""
        letters = "rwkvag" if self.ranks.gate else "rwkva"
        return TokenShiftSpec(names=tuple(f"x_{letter}" for letter in letters))

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> TimeMix7:
        """See MixerSpec."""
        return TimeMix7(scope / self.name, cache, self, adds=adds)


class LowRankDecision:
    """x_TE -> y_TC: a projection down, an activation, "" for none, and a projection up. `scope` is
    its own."""

    def __init__(
        self, scope: Scope, spec: TimeMix7Spec, rank: int, activation: str, *, bias: bool = True
    ) -> None:
        part = Part("2", spec.heads * spec.head_dim, spec.heads)
        self._down = WholeLinear(scope / "0", spec.width, rank)
        self._activation = ElementwiseActivation(scope, activation) if activation else None
        self._up = ColumnLinear(scope, rank, (part,), bias=bias)

    def project(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        inner_TR = self._down.project(x_TE)
        if self._activation is not None:
            inner_TR = self._activation.apply(inner_TR)
        return self._up.project(inner_TR)


class TimeMix7:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the last x and the state of the
    recurrence [H, D, D], which is float32: it is a sum over all tokens so far."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: TimeMix7Spec, *, adds: bool) -> None:
        channels = spec.heads * spec.head_dim
        parts = [Part(f"{one}_proj", channels, spec.heads) for one in "rkv"]
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._shift = TokenShift(scope, cache, spec.width, spec.shift)
        self._receptance, self._key, self._value = (
            ColumnLinear(scope, spec.width, (part,)) for part in parts
        )
        ranks = spec.ranks
        self._decay = LowRankDecision(scope / "w_lora" / "lora", spec, ranks.decay, "tanh")
        self._rate = LowRankDecision(scope / "a_lora" / "lora", spec, ranks.rate, "")
        self._mix = None
        if not spec.first:
            self._mix = LowRankDecision(scope / "v_lora" / "lora", spec, ranks.value, "")
        self._gate = None
        if ranks.gate:
            at = scope / "g_lora" / "lora"
            self._gate = LowRankDecision(at, spec, ranks.gate, "sigmoid", bias=False)
        self._weights = [wide_param(scope, name, parts[1]) for name in ("k_k", "k_a")]
        if spec.flat_bonus:
            self._weights.append(wide_param(scope, "r_k", parts[0]))
        else:
            rows = Part("r_k", spec.heads, spec.heads)
            self._weights.append(wide_param(scope, "r_k", rows, spec.head_dim))
        if spec.eps is not None:
            for name, init in (("weight", "ones"), ("bias", "zeros")):
                self._weights.append(wide_param(scope / "g_norm", name, parts[0], init=init))
        self._out = RowLinear(scope / "o_proj", parts[0], spec.width, adds=adds)
        self._recurrence: Wkv7 = not_loaded
        self._gated: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        shape = (self._heads, self._spec.head_dim, self._spec.head_dim)
        state = StateForm(cache=self._cache + 1, shape=shape, dtype=torch.float32)
        return (self._shift.form, state)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, C], of the tokens `at_N`, None: of all."""
        rows = scan_rows(batch, self._cache)
        r_TE, w_TE, k_TE, v_TE, a_TE, *gate = self._shift.of(x_TE, batch, rows)
        v_TC = self._value.project(v_TE)
        y_TC = self._recurrence(
            self._receptance.project(r_TE),
            self._decay.project(w_TE),
            self._key.project(k_TE),
            v_TC,
            self._rate.project(a_TE),
            *self._mixed(v_TC, v_TE),
            batch.kv[self._cache + 1],
            rows,
        )
        if self._gate is not None:
            y_TC = self._gated(y_TC, self._gate.project(gate[0]))
        return y_TC if at_N is None else y_TC.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _mixed(self, v_TC: torch.Tensor, v_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first layer's values, and how far these go towards them; nothing in that layer."""
        values = self._spec.values
        first_TC = values.v_TC
        if self._mix is None:
            values.v_TC = v_TC
        if self._spec.last:
            values.v_TC = None
        if self._mix is None:
            return ()
        assert first_TC is not None, "the first layer has not run"
        return first_TC, self._mix.project(v_TE)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        facts = {"device": scope.kind, "dtype": scope.dtype}
        problem = Wkv7Problem(
            **facts,
            heads=self._heads,
            head_dim=spec.head_dim,
            mixes=not spec.first,
            normed=spec.eps is not None,
            eps=spec.eps or 0.0,
        )
        weights = [weight.take().flatten() for weight in self._weights]
        weights += [None] * (5 - len(weights))
        self._recurrence = scope.bind(WKV7, problem, *weights)
        if self._gate is not None:
            gate = GatedNormProblem(**facts, width=problem.channels, group=0, gate="")
            self._gated = scope.bind(GATED_NORM, gate, None)
