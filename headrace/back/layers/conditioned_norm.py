"""A norm whose result is multiplied with what a small network makes of one number that is the same
for all tokens: it becomes part of the weight when that is loaded (Voxtral Realtime: by how many
tokens the text is behind the sound)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope

THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ConditionedNormSpec:
    """`number`: what the network is told; `inner`: its width."""

    number: float
    inner: int = 32

    def build(self, scope: Scope, width: int, *, eps: float) -> RMSNorm:
        """The norm's tensors are `scope / "weight"`, the network's "ada.linear1" and
        "ada.linear2"."""
        return ConditionedNorm(scope, width, eps=eps, spec=self)


class ConditionedNorm(RMSNorm):
    """By ConditionedNormSpec."""

    def __init__(self, scope: Scope, width: int, *, eps: float, spec: ConditionedNormSpec) -> None:
        self._spec = spec
        self._up = scope.param("ada.linear1.weight", (spec.inner, width))
        self._down = scope.param("ada.linear2.weight", (width, spec.inner))
        super().__init__(scope, width, eps=eps)

    def _loaded(self) -> torch.Tensor:
        up, down = self._up.take(), self._down.take()
        waves_E = number_waves(self._spec.number, up.shape[1]).to(up.device, up.dtype)
        share_E = F.linear(F.gelu(F.linear(waves_E, up)), down)
        return super()._loaded() * (1.0 + share_E.float())


def number_waves(number: float, width: int) -> torch.Tensor:
    """[width]: cosines, then sines, of the number at falling speeds."""
    half = width // 2
    waves = number * torch.exp(-math.log(THETA) * torch.arange(half).float() / half)
    return torch.cat((waves.cos(), waves.sin()))
