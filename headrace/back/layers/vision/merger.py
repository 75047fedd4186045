"""What leads from a vision tower to the decoder: windows of merge x merge patches side by side, two
linear layers with an activation between them.

N patches, M tokens, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class MergerSpec:
    """`merge` patches a side; `norm_merged`: the norm is over the whole window, not over each
    patch. `names`: of the norm and the two layers."""

    width: int
    outputs: int
    merge: int
    norm: NormSpec
    eps: float
    names: tuple[str, str, str]
    norm_merged: bool = False
    activation: str = "gelu"


class WindowMerger:
    """x_NE -> y_MF: N rows in windows, each of which becomes one."""

    def __init__(self, scope: Scope, spec: MergerSpec) -> None:
        norm, up, down = spec.names
        inner = spec.width * spec.merge**2
        self._inner = inner
        self._norm_merged = spec.norm_merged
        width = inner if spec.norm_merged else spec.width
        self._norm = spec.norm.build(scope / norm, width, eps=spec.eps)
        part = Part(up, inner, inner)
        self._up = ColumnLinear(scope, inner, (part,), bias=True)
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._down = RowLinear(scope / down, part, spec.outputs, bias=True)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self._norm_merged:
            x_MI = self._norm.norm(x_NE.view(-1, self._inner))
        else:
            x_MI = self._norm.norm(x_NE).view(-1, self._inner)
        return self._down.project(self._activation.apply(self._up.project(x_MI)))
