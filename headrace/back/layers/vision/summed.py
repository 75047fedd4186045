"""What some layers of a vision tower see, each led through a merger of its own, and added up
(openPangu-VL).

N patches, M tokens, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import MergerSpec


@dataclass(frozen=True, kw_only=True)
class SummedLayers:
    """`count` layers are merged, as `TowerSpec.summed` has them; the tower's norm behind its layers
    stands before each merger. `merger`: of each, its `outputs` those of a merger; `projection`: the
    linear layer behind the SiLU of the sum, which leads to `outputs`."""

    count: int
    merger: MergerSpec
    projection: str
    outputs: int

    @property
    def merge(self) -> int:
        """Patches per side of a window."""
        return self.merger.merge

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> SummedMerger:
        """See TowerMergerSpec."""
        assert not norm_merged, "its norms are of patches"
        return SummedMerger(scope, name, self)


class SummedMerger:
    """x_NE [L * N, E], of layer by layer -> y_MF."""

    def __init__(self, scope: Scope, name: str, spec: SummedLayers) -> None:
        self._mergers = [spec.merger.build(scope / name, str(index)) for index in range(spec.count)]
        outputs = spec.merger.outputs
        self._project = WholeLinear(scope / spec.projection, outputs, spec.outputs, bias=True)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See TowerMerger."""
        parts = zip(self._mergers, x_NE.chunk(len(self._mergers)), strict=True)
        y_MF = torch.stack([merger.merge(part) for merger, part in parts]).sum(0)
        return self._project.project(F.silu(y_MF))
