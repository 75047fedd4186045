"""The norms of an attention's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.layers.norm import (
    RMS,
    HeadsLayerNorm,
    HeadsRMSNorm,
    LayerNorm,
    NormSpec,
    RMSNorm,
    SplitRMSNorm,
)
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """The norms of queries and keys.

    over        "head": each head, all with one weight; "heads": each head with a weight of its own
                (a layer norm without bias); "each": the same by root mean square; "width": all
                heads together (root mean square)
    names       the two modules
    listed      "heads" alone: the checkpoint has a tensor for each head, under this name
    after_rope  it comes behind the rotation, not before it
    """

    norm: NormSpec = RMS
    eps: float
    over: str = "head"
    names: tuple[str, str] = ("q_norm", "k_norm")
    listed: str | None = None
    after_rope: bool = False

    def build(self, scope: Scope, part: Part) -> HeadNorm:
        """The norm of one projection, split over the ranks like `part`; x is [T, H, D], or [T, W]
        for "width"."""
        if self.over == "heads":
            return HeadsLayerNorm(scope, part, eps=self.eps, listed=self.listed)
        if self.over == "each":
            return HeadsRMSNorm(scope, part, eps=self.eps)
        if self.over == "width":
            return SplitRMSNorm(scope, part, eps=self.eps)
        return self.norm.build(scope, part.size // part.units, eps=self.eps)


HeadNorm = RMSNorm | LayerNorm | SplitRMSNorm | HeadsLayerNorm | HeadsRMSNorm
