"""Two mixers of the same tokens, side by side: their results are added (Falcon-H1: a recurrence and
attention).

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import sum_branches
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class MixerPairSpec:
    """Both lie in the layer under their own names; the caches of `second` follow those of
    `first`."""

    first: MixerSpec
    second: MixerSpec

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> MixerPair:
        """See MixerSpec. Both read what the norm gives, so it is not part of them."""
        first = self.first.build(scope, cache, adds=adds)
        second = self.second.build(scope, cache + len(first.kv_forms), adds=adds)
        return MixerPair(first, second)


class MixerPair:
    """x_TE -> y_TE: see Mixer."""

    norms = False

    def __init__(self, first: Mixer[Any], second: Mixer[Any]) -> None:
        self._first, self._second = first, second

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of both."""
        return self._first.kv_forms + self._second.kv_forms

    @property
    def probed(self) -> bool:
        """See Mixer."""
        return self._first.probed or self._second.probed

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        """What each hands on."""
        return self._first.queries(x_TE, batch, at_N), self._second.queries(x_TE, batch, at_N)

    def attend_into(
        self, handed: tuple[Any, Any], residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        first = self._first.attend_into(handed[0], residual_TE, batch)
        return sum_branches(first, self._second.attend_into(handed[1], residual_TE, batch))
