"""Layers with the gated delta rule: a short convolution of queries, keys and values, the
recurrence, a gated norm of each head (gated delta networks, Yang et al. 2024, section 3.4; Kimi
delta attention, Kimi Team 2025, section 3).

T query tokens, E hidden size, G key heads of K, H value heads of V, C the channels of queries, keys
and values; G and H are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_delta.op import OP as GATED_DELTA
from headrace.back.kernels.gated_delta.op import GatedDelta as Rule
from headrace.back.kernels.gated_delta.op import GatedDeltaProblem
from headrace.back.layers.linear import ColumnLinear, MergedTensor, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.gated_norm import GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows, wide_param
from headrace.back.layers.ssm.token_taps import TokenTaps, TokenTapsSpec
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard, local_units

QUERY, KEY, VALUE, GATE, BETA, DECAY = range(6)
"""Places of the projections in the one GEMM of a layer's input."""


@dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """Where a layer's tensors lie. `parts`: the projections by their places; `merged`: the tensors
    that hold several of them; `convs`: those of the convolution, one for all channels or one each
    for queries, keys and values. `gate_up`, `decay_up`: the second factors of projections of low
    rank, None: there is one factor."""

    module: str = "linear_attn"
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    merged: tuple[MergedTensor, ...] = ()
    convs: tuple[str, ...] = ("q_conv1d", "k_conv1d", "v_conv1d")
    gate_up: str | None = None
    decay_up: str | None = None
    out: str = "o_proj"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """One layer, in global sizes. `per_channel`, `bound`, `beta_scale`: see op gated_delta.
    `low_rank`: of gate and decay, where they have two factors. `decay_shape`: of A_log, -1 for the
    heads; `decay_rows`: it has so many numbers, the first ones of heads (Kimi K3). `token_taps`:
    the convolution is one of values, whose taps follow from the token."""

    width: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: GatedNormSpec
    names: DeltaNames = DeltaNames()
    per_channel: bool = False
    bound: float = 0.0
    beta_scale: float = 1.0
    low_rank: int = 0
    decay_shape: tuple[int, ...] = (-1,)
    decay_rows: int | None = None
    token_taps: TokenTapsSpec | None = None

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> GatedDelta:
        """See MixerSpec."""
        return GatedDelta(scope / self.names.module, cache, self, norm=norm, adds=adds)

    @property
    def decay_size(self) -> int:
        """Numbers of a token that say what is kept."""
        return self.heads * (self.key_dim if self.per_channel else 1)

    def parts(self) -> tuple[Part, ...]:
        """The projections of a layer's input by their places, and that of taps behind them; factors
        of low rank are whole on each rank."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        sizes = (keys, keys, values, values, self.heads, self.decay_size)
        units = (self.key_heads, self.key_heads, *(self.heads,) * 4)
        names = self.names
        whole = {GATE: names.gate_up is not None, DECAY: names.decay_up is not None}
        parts = tuple(
            Part(name, self.low_rank, 1) if whole.get(place) else Part(name, size, unit)
            for place, (name, size, unit) in enumerate(zip(names.parts, sizes, units, strict=True))
        )
        taps = self.token_taps
        return parts if taps is None else (*parts, Part(taps.names[0], taps.rank, 1))


class GatedDelta:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are the convolution's last inputs and
    the state of the recurrence [H, K, V], which is float32: it is a sum over all tokens so far."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: GatedDeltaSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        names, parts = spec.names, spec.parts()
        self._scope, self._spec, self._cache = scope, spec, cache
        values = Part("value heads", spec.heads * spec.value_dim, spec.heads)
        self._heads = local_units(values, scope.mesh.tp)
        self._key_heads = local_units(parts[KEY], scope.mesh.tp)
        self._in = ColumnLinear(scope, spec.width, parts, tensors=names.merged, norm=norm)
        self._conv = self._convolution(parts[: VALUE + 1])
        self._gate_up = self._up(names.gate_up, values.size)
        self._decay_up = self._up(names.decay_up, spec.decay_size)
        self._decay = self._decay_param()
        self._bias = wide_param(scope, "dt_bias", Part("dt_bias", spec.decay_size, spec.heads))
        self._gated_norm = GatedNorm(scope, values, spec.norm)
        self._out = RowLinear(scope / names.out, values, spec.width, adds=adds)
        self._rule: Rule = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return self._conv.forms_before(self._heads, self._spec.key_dim, self._spec.value_dim)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, [T, H * V], of the tokens `at_N`, None: of all."""
        rows, spec = scan_rows(batch, self._cache), self._spec
        sizes = self._in.sizes
        qkv_sizes = sizes[: VALUE + 1]
        split = (sum(qkv_sizes), *sizes[GATE:])
        qkv_TC, gate_TX, b_TH, a_TX, *taps = self._in.project(x_TE).split_with_sizes(split, dim=1)
        qkv_TC = self._conv.apply(qkv_TC, batch, rows, *taps)
        q_TX, k_TX, v_TX = qkv_TC.split_with_sizes(qkv_sizes, dim=1)
        if self._decay_up is not None:
            a_TX = self._decay_up.project(a_TX)
        y_THV = self._rule(
            q_TX.unflatten(1, (-1, spec.key_dim)),
            k_TX.unflatten(1, (-1, spec.key_dim)),
            v_TX.unflatten(1, (-1, spec.value_dim)),
            a_TX.unflatten(1, (self._heads, -1)) if spec.per_channel else a_TX,
            b_TH,
            batch.kv[self._cache + 1],
            rows,
        )
        if self._gate_up is not None:
            gate_TX = self._gate_up.project(gate_TX)
        y_TX = self._gated_norm.apply(y_THV.flatten(1), gate_TX)
        return y_TX if at_N is None else y_TX.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)

    def _convolution(self, qkv: tuple[Part, ...]) -> ShortConv | TokenTaps:
        scope, cache, spec, convs = self._scope, self._cache, self._spec, self._spec.names.convs
        if spec.token_taps is not None:
            return TokenTaps(scope, cache, qkv, spec.token_taps, taps=spec.taps)
        at, separate = (scope, convs) if convs[1:] else (scope / convs[0], ())
        return ShortConv(at, cache, qkv, taps=spec.taps, separate=separate)

    def _up(self, name: str | None, size: int) -> ColumnLinear | None:
        if name is None:
            return None
        part = Part(name, size, self._spec.heads)
        return ColumnLinear(self._scope, self._spec.low_rank, (part,))

    def _decay_param(self) -> Param:
        """A_log in float32: it goes into an exponent."""
        rows = self._spec.decay_rows
        if rows is not None:
            return self._scope.param("A_log", (rows,), init="zeros", dtype=torch.float32)
        shape, heads = self._spec.decay_shape, Part("A_log", self._spec.heads, self._spec.heads)
        shard = Shard(axis="tp", dim=shape.index(-1), parts=(heads,))
        sizes = tuple(heads.size if size < 0 else size for size in shape)
        return self._scope.param("A_log", sizes, shard=shard, init="zeros", dtype=torch.float32)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        problem = GatedDeltaProblem(
            device=scope.kind,
            dtype=scope.dtype,
            key_heads=self._key_heads,
            heads=self._heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            per_channel=spec.per_channel,
            bound=spec.bound,
            beta_scale=spec.beta_scale,
        )
        decay_H = -self._decay.take().flatten().exp()
        if spec.decay_rows is not None:
            first = scope.mesh.tp.rank * self._heads
            decay_H = decay_H[first : first + self._heads].contiguous()
        bias = self._bias.take().view(problem.bias_shape)
        self._rule = scope.bind(GATED_DELTA, problem, decay_H, bias)
