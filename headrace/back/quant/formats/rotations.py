"""Hadamard matrices that weights were rotated with, undone block by block."""

from __future__ import annotations

import torch


def rotated_back(weight_OI: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of `size` inputs, a power of two, times Sylvester's matrix over the root of its size,
    which is its own inverse."""
    blocks = weight_OI.unflatten(1, (-1, size))
    apart = 1
    while apart < size:
        first, second = blocks.unflatten(2, (-1, 2, apart)).unbind(3)
        blocks = torch.stack((first + second, first - second), 3).flatten(2)
        apart *= 2
    return blocks.flatten(1) * size**-0.5
