"""A convolution of values whose taps follow from the token (JetBlock, Jet-Nemotron, Gu et al. 2025,
section 2.3): two projections of the layer's input, a SiLU between them, give each channel its taps.
Queries and keys beside it pass a SiLU alone.

T query tokens, C channels of queries, keys and values, V of values, R rank, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.earlier_inputs import EarlierInputs
from headrace.back.parallel.shard import Part, local_size


@dataclass(frozen=True, kw_only=True)
class TokenTapsSpec:
    """`rank`: of the two projections `names`, which lie in the layer."""

    rank: int
    names: tuple[str, str] = (
        "dynamic_conv1d.kernel_generator.w1",
        "dynamic_conv1d.kernel_generator.w2",
    )


class TokenTaps:
    """x_TC -> y_TC. `scope` is the layer's; `parts`: queries, keys and values as they lie side by
    side. Its cache is that of earlier values."""

    def __init__(
        self, scope: Scope, cache: int, parts: tuple[Part, ...], spec: TokenTapsSpec, *, taps: int
    ) -> None:
        *before, values = parts
        self._cache, self._taps = cache, taps
        self._split = [sum(local_size(part, scope.mesh.tp) for part in before)]
        self._split.append(local_size(values, scope.mesh.tp))
        of_taps = Part(spec.names[1], values.size * taps, values.units)
        self._generator = ColumnLinear(scope, spec.rank, (of_taps,), bias=True)
        self._before = EarlierInputs(scope, cache, self._split[1], taps=taps)

    @property
    def form(self) -> StateForm:
        """See the class."""
        return self._before.form

    def forms_before(self, *shape: int) -> tuple[CacheForm, ...]:
        """The caches of a layer that has a state in float32, of this shape, behind it."""
        return self.form, StateForm(cache=self._cache + 1, shape=shape, dtype=torch.float32)

    def apply(
        self, x_TC: torch.Tensor, batch: Batch, rows: ScanRows, inner_TR: torch.Tensor
    ) -> torch.Tensor:
        """`inner_TR`: what the first of the projections gives."""
        others_TX, v_TV = x_TC.split_with_sizes(self._split, dim=1)
        taps_TVW = self._generator.project(F.silu(inner_TR)).unflatten(1, (-1, self._taps))
        taps_TVW = taps_TVW.float()
        sum_TV = v_TV.float() * taps_TVW[..., -1]
        for lag, before_TV in enumerate(self._before.of(v_TV, batch, rows), 1):
            sum_TV = sum_TV + before_TV.float() * taps_TVW[..., -1 - lag]
        return F.silu(torch.cat((others_TX, sum_TV.to(x_TC.dtype)), dim=1))
