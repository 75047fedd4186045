"""Pictures cut into squares of patches that see each other, and put together again.

B pictures of H x W patches, V windows of S x S, E width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def in_windows(x_BHWE: torch.Tensor, side: int) -> torch.Tensor:
    """[V, S, S, E], the edges filled up with zeros."""
    below, beside = -x_BHWE.shape[1] % side, -x_BHWE.shape[2] % side
    if below or beside:
        x_BHWE = F.pad(x_BHWE, (0, 0, 0, beside, 0, below))
    rows = x_BHWE.unflatten(2, (-1, side)).unflatten(1, (-1, side))
    return rows.permute(0, 1, 3, 2, 4, 5).flatten(0, 2)


def out_of_windows(x_VSSE: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The opposite: [B, H, W, E] of this size."""
    side = x_VSSE.shape[1]
    down, across = -(-size[1] // side), -(-size[2] // side)
    whole = x_VSSE.view(-1, down, across, side, side, x_VSSE.shape[3]).permute(0, 1, 3, 2, 4, 5)
    whole = whole.reshape(-1, down * side, across * side, x_VSSE.shape[3])
    return whole[:, : size[1], : size[2]]
