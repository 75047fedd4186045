"""Which experts the routers of a model choose, seen in steps in which somebody looks: elsewhere
nothing of it is there. One tap for all mixtures of a model, in the order in which they are
built."""

from __future__ import annotations

import torch


class RoutingTap:
    """`top_k` of each mixture; `seen`: while somebody looks, int [T, K] of each mixture that has
    run, in their order."""

    def __init__(self) -> None:
        self.top_k: list[int] = []
        self.seen: list[torch.Tensor] | None = None

    def see(self, expert_TK: torch.Tensor) -> None:
        """A router has chosen."""
        if self.seen is not None:
            self.seen.append(expert_TK)
