"""RWKV 6's time mixing (Peng et al. 2024, "Eagle and Finch", section 4.2): each token beside the
one before it, by shares that follow from both, the recurrence with its norm (op wkv6), a gate.
Without a weight for the token itself and without a norm it is QRWKV 6's, with several heads to a
key head.

T query tokens, E hidden size, H heads of D, C = H * D; H is this rank's. R: rank of the shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.linear.op import Linear
from headrace.back.kernels.wkv6.op import OP as WKV6
from headrace.back.kernels.wkv6.op import Wkv6, Wkv6Problem
from headrace.back.layers.gemms import bind_adapted
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import scan_rows, wide_param
from headrace.back.layers.ssm.token_shift import TokenShift, TokenShiftSpec
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Part, Shard, local_units

LETTERS = "wkvrg"
"""Of the shares as RWKV 6 stacks them: of decay, key, value, receptance and gate."""
BOTH = TokenShiftSpec(names=("time_maa_x",), gives_before=True)


@dataclass(frozen=True, kw_only=True)
class TimeMix6Names:
    """Where a layer's tensors lie. `by_output`: projections of low rank are stored as [outputs,
    inputs], else as [inputs, outputs]."""

    module: str = "attention"
    receptance: str = "receptance"
    key: str = "key"
    value: str = "value"
    gate: str = "gate"
    out: str = "output"
    by_output: bool = False


@dataclass(frozen=True, kw_only=True)
class TimeMix6Spec:
    """One layer, in global sizes. `mix_rank`, `decay_rank`: of the projections that decide on the
    shares and on the decay. `eps`: of the norm of heads; None: there is none, and no weight for the
    token itself. `gate`: what opens it. `bias`: receptance, key and value have one."""

    width: int
    heads: int
    key_heads: int
    head_dim: int
    mix_rank: int
    decay_rank: int
    eps: float | None
    gate: str = "silu"
    bias: bool = False
    names: TimeMix6Names = TimeMix6Names()

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> TimeMix6:
        """See MixerSpec."""
        return TimeMix6(scope / self.names.module, cache, self, adds=adds)


class TimeMix6:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the last x and the state of the
    recurrence [H, D, D], which is float32: it is a sum over all tokens so far."""

    norms = probed = False

    def __init__(self, scope: Scope, cache: int, spec: TimeMix6Spec, *, adds: bool) -> None:
        names, channels = spec.names, spec.heads * spec.head_dim
        keys = spec.key_heads * spec.head_dim
        receptance = Part(names.receptance, channels, spec.heads)
        key, value = (Part(one, keys, spec.key_heads) for one in (names.key, names.value))
        self._scope, self._spec, self._cache = scope, spec, cache
        self._heads = local_units(receptance, scope.mesh.tp)
        self._key_heads = local_units(key, scope.mesh.tp)
        self._shift = TokenShift(scope, cache, spec.width, BOTH)
        self._receptance, self._key, self._value = (
            ColumnLinear(scope, spec.width, (part,), bias=spec.bias)
            for part in (receptance, key, value)
        )
        gate = Part(names.gate, channels, spec.heads)
        self._gate = ColumnLinear(scope, spec.width, (gate,))
        self._shares = [scope.param(f"time_maa_{one}", (1, 1, spec.width)) for one in LETTERS]
        self._activation = ElementwiseActivation(scope, "tanh")
        self._down = self._matrix("time_maa_w1", len(LETTERS) * spec.mix_rank, spec.width)
        sizes = (spec.width, spec.mix_rank) if names.by_output else (spec.mix_rank, spec.width)
        self._up = scope.param("time_maa_w2", (len(LETTERS), *sizes))
        self._decay_down = self._matrix("time_decay_w1", spec.decay_rank, spec.width)
        self._decay_up = self._matrix("time_decay_w2", channels, spec.decay_rank, part=receptance)
        self._decay = scope.param(
            "time_decay",
            (1, 1, channels),
            shard=Shard(axis="tp", dim=2, parts=(receptance,)),
            init="zeros",
        )
        self._weights = []
        if spec.eps is not None:
            rows = Part("time_faaaa", spec.heads, spec.heads)
            self._weights.append(wide_param(scope, "time_faaaa", rows, spec.head_dim))
            for name, init in (("weight", "ones"), ("bias", "zeros")):
                self._weights.append(wide_param(scope / "ln_x", name, receptance, init=init))
        self._out = RowLinear(scope / names.out, receptance, spec.width, adds=adds)
        self._to_share: list[Linear] = []
        self._to_inner: Linear = not_loaded
        self._to_decay_rank: Linear = not_loaded
        self._to_decay: Linear = not_loaded
        self._recurrence: Wkv6 = not_loaded
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
        both_TE, before_TE = self._shift.of(x_TE, batch, rows)
        w_TE, k_TE, v_TE, r_TE, g_TE = self._shifted(x_TE, both_TE, before_TE)
        y_TC = self._recurrence(
            self._receptance.project(r_TE),
            self._decays(w_TE),
            self._key.project(k_TE),
            self._value.project(v_TE),
            batch.kv[self._cache + 1],
            rows,
        )
        y_TC = self._gated(y_TC, self._gate.project(g_TE))
        return y_TC if at_N is None else y_TC.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _shifted(
        self, x_TE: torch.Tensor, both_TE: torch.Tensor, before_TE: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Each token moved towards the one before it, by the five shares."""
        inner_TX = self._activation.apply(self._to_inner(both_TE))
        inner_5TR = inner_TX.unflatten(1, (len(LETTERS), -1)).transpose(0, 1).contiguous()
        change_TE = before_TE - x_TE
        return tuple(
            torch.addcmul(x_TE, change_TE, to_share(inner_TR))
            for to_share, inner_TR in zip(self._to_share, inner_5TR, strict=True)
        )

    def _decays(self, w_TE: torch.Tensor) -> torch.Tensor:
        """What op wkv6 takes two exponentials of, [T, C]."""
        return self._to_decay(self._activation.apply(self._to_decay_rank(w_TE)))

    def _matrix(self, name: str, outputs: int, inputs: int, *, part: Part | None = None) -> Param:
        """A projection of low rank [outputs, inputs]; `part`: how its outputs are split."""
        turned = not self._spec.names.by_output
        shape = (inputs, outputs) if turned else (outputs, inputs)
        piece = WeightPiece(name=self._scope.name(name), shape=shape, transposed=turned)
        shard = None if part is None else Shard(axis="tp", dim=0, parts=(part,))
        return self._scope.param(name, (outputs, inputs), pieces=(piece,), shard=shard)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        up = self._up.take() if spec.names.by_output else self._up.take().transpose(1, 2)
        self._to_share = [
            bind_adapted(scope, up_ER.contiguous(), share.take().flatten(), None)
            for up_ER, share in zip(up, self._shares, strict=True)
        ]
        self._to_inner = bind_adapted(scope, self._down.take(), None, None)
        self._to_decay_rank = bind_adapted(scope, self._decay_down.take(), None, None)
        decay_C = self._decay.take().flatten()
        self._to_decay = bind_adapted(scope, self._decay_up.take(), decay_C, None)
        facts = {"device": scope.kind, "dtype": scope.dtype}
        problem = Wkv6Problem(
            **facts,
            heads=self._heads,
            key_heads=self._key_heads,
            head_dim=spec.head_dim,
            first=spec.eps is not None,
            normed=spec.eps is not None,
            eps=spec.eps or 0.0,
        )
        weights = [weight.take().flatten() for weight in self._weights] or [None] * 3
        self._recurrence = scope.bind(WKV6, problem, *weights)
        gate = GatedNormProblem(**facts, width=problem.channels, group=0, gate=spec.gate)
        self._gated = scope.bind(GATED_NORM, gate, None)
