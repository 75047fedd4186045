"""What recurrent layers share: their rows of a step, the short convolution before a recurrence, and
parameters that are kept in float32.

T query tokens, C channels, W taps.
"""

from __future__ import annotations

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.causal_conv.op import OP, CausalConv, CausalConvProblem
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Part, Shard, local_size


def scan_rows(batch: Batch, cache: int) -> ScanRows:
    """Which tokens of the step belong to which row of the state that holds this cache."""
    plan = batch.plans[batch.group_of_layer[cache]]
    assert batch.row_R is not None, "a batch for recurrent layers names the rows of their state"
    return ScanRows(
        row_R=batch.row_R,
        query_start_R1=plan.query_start_R1,
        decode=plan.max_query_len == 1,
        trail=batch.trail,
    )


def wide_param(
    scope: Scope, name: str, part: Part, *more: int, init: str = "zeros", dim: int = 0
) -> Param:
    """A parameter [part.size, *more] split like `part`, in float32 whatever the model's dtype: what
    goes into an exponent."""
    shard = Shard(axis="tp", dim=dim, parts=(part,))
    return scope.param(name, (part.size, *more), shard=shard, init=init, dtype=torch.float32)


class ShortConv:
    """x_TC -> y_TC: a causal convolution of each channel with a SiLU behind it. `scope` is that of
    its weight [channels, 1, taps], or with `separate` that around these modules, which have the
    weight of one part each; `parts`: the channels as they lie side by side. `form` is its cache.
    `adds_input`: y + x instead of y; `scale`: what x is multiplied with on its way in, a number;
    `factor`: what y is multiplied with."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        parts: tuple[Part, ...],
        *,
        taps: int,
        bias: bool = False,
        activation: str = "silu",
        separate: tuple[str, ...] = (),
        adds_input: bool = False,
        scale: Param | None = None,
        factor: float = 1.0,
    ) -> None:
        self._factor = factor
        self._scope, self._cache, self._taps = scope, cache, taps
        self._activation = activation
        self._adds_input, self._scale = adds_input, scale
        assert not (adds_input and activation), activation
        self._conv: CausalConv = not_loaded
        channels = sum(part.size for part in parts)
        shard = Shard(axis="tp", dim=0, parts=parts)
        self.sizes = [local_size(part, scope.mesh.tp) for part in parts]
        pieces = tuple(
            WeightPiece(
                name=scope.name(f"{name}.weight"),
                shape=(part.size, 1, taps),
                offset=sum(before.size for before in parts[:place]),
            )
            for place, (name, part) in enumerate(zip(separate, parts, strict=bool(separate)))
        )
        self._weight = scope.param(
            "weight", (channels, 1, taps), pieces=pieces or None, shard=shard
        )
        self._bias = scope.param("bias", (channels,), shard=shard, init="zeros") if bias else None
        scope.on_finish(self._finish)

    @property
    def form(self) -> StateForm:
        """The last inputs of a row."""
        return StateForm(cache=self._cache, shape=(self._taps - 1, sum(self.sizes)))

    def forms_before(self, *shape: int) -> tuple[CacheForm, ...]:
        """The caches of a layer that has a state in float32, of this shape, behind it."""
        return self.form, StateForm(cache=self._cache + 1, shape=shape, dtype=torch.float32)

    def apply(self, x_TC: torch.Tensor, batch: Batch, rows: ScanRows) -> torch.Tensor:
        """See the class."""
        return self._conv(x_TC, batch.kv[self._cache], rows)

    def _finish(self) -> None:
        problem = CausalConvProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            channels=sum(self.sizes),
            taps=self._taps,
            activation=self._activation,
            bias=self._bias is not None,
        )
        weight_WC = self._weight.take().float().squeeze(1).t().contiguous()
        if self._adds_input:
            weight_WC[-1] += 1.0
        if self._factor != 1.0:
            assert self._bias is None and not self._activation, self._factor
            weight_WC *= self._factor
        if self._scale is not None:
            weight_WC *= self._scale.take().float()
        bias_C = None if self._bias is None else self._bias.take().float()
        self._conv = self._scope.bind(OP, problem, weight_WC, bias_C)
