"""How kernels with one program per row read tensors of rows: the norms."""

from __future__ import annotations

import torch

from headrace.back.kernels.triton.wrap import power_of_two


def norm_block(width: int) -> tuple[int, int]:
    """The padded width, and the warps that read it 16 bytes a thread where it is long enough."""
    block = power_of_two(width, least=32)
    return block, min(16, max(1, block // 256))


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(rows of the inner dimension, stride of the outer, stride of the inner) of 1 to 3
    dimensions."""
    if x.dim() == 3:
        return max(x.shape[1], 1), x.stride(0), x.stride(1)
    return 1, x.stride(0) if x.dim() == 2 else 0, 0
