"""Attention that is sparse in blocks (Phi-3-small; Abdin et al. 2024, section 2.1): a query sees
the blocks of keys just before its own, and of those farther before one in so many, which one being
the head's own, or none (Rnj-1). Or the blocks it sees are those of its own group of blocks, and of
the groups before a few of each (Child et al. 2019, section 4.3: fixed attention; ruGPT-3 XL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """`block`: positions of a block; `near`: blocks that are seen, the query's own among them, or
    `grouped`, blocks of a group; `stride`: of the blocks before them those are seen whose number
    and the head's phase, and 1, leave less than `wide` when divided by it; 0: none. `phases`: one
    for each query head."""

    block: int
    near: int
    stride: int
    phases: tuple[int, ...]
    grouped: bool = False
    wide: int = 1

    @property
    def reach(self) -> int:
        """Positions up to which everything is seen."""
        return self.block * self.near

    def hidden(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[H, Q, S]: which keys at these positions [.., S] queries at those [Q, 1] do not see,
        apart from later ones."""
        key_block = key // self.block
        if self.grouped:
            far = query // self.reach > key // self.reach
        else:
            far = query // self.block - key_block >= self.near
        if not self.stride:
            return far.expand(len(self.phases), -1, -1)
        phase_H11 = torch.tensor(self.phases, device=key.device)[:, None, None]
        return far & ((key_block + phase_H11 + 1) % self.stride >= self.wide)
