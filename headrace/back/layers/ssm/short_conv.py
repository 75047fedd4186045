"""A layer that is a short convolution between two gates (LFM2, Liquid AI 2025): y = out(C *
conv(B * x)), B, C and x being projections of the layer's input.

T query tokens, E hidden size; a rank holds its share of the channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import GatedNorm, GatedNormSpec
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part

PRODUCT = GatedNormSpec(groups=0, gate="")
"""x times the gate as it is."""


@dataclass(frozen=True, kw_only=True)
class GatedConvSpec:
    """One layer, in global sizes. `name`: the module in its layer."""

    width: int
    taps: int
    bias: bool = False
    name: str = "conv"

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> GatedConv:
        """See MixerSpec."""
        return GatedConv(scope / self.name, cache, self, norm=norm, adds=adds)


class GatedConv:
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its cache is the convolution's last inputs."""

    probed = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: GatedConvSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        parts = tuple(Part(f"{name} of in_proj", spec.width, spec.width) for name in "BCx")
        self._cache = cache
        self._in = ColumnLinear(
            scope, spec.width, parts, bias=spec.bias, merged="in_proj", norm=norm
        )
        self._conv = ShortConv(
            scope / "conv", cache, parts[:1], taps=spec.taps, bias=spec.bias, activation=""
        )
        self._product = GatedNorm(scope, parts[0], PRODUCT)
        self._out = RowLinear(scope / "out_proj", parts[0], spec.width, bias=spec.bias, adds=adds)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        return (self._conv.form,)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._in.norms

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the output projection reads, of the tokens `at_N`, None: of all."""
        b_TC, c_TC, x_TC = self._in.project(x_TE).split_with_sizes(self._in.sizes, dim=1)
        inner_TC = self._product.apply(x_TC, b_TC)
        inner_TC = self._conv.apply(inner_TC, batch, scan_rows(batch, self._cache))
        y_TC = self._product.apply(inner_TC, c_TC)
        return y_TC if at_N is None else y_TC.index_select(0, at_N)

    def attend_into(
        self, q_TX: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._out.project_into(q_TX, residual_TE)
