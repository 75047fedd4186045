"""Collectives over one axis of the mesh. An axis of one rank costs nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of `x` over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    return x


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The axis's tensors side by side along the last dimension, in rank order."""
    if axis.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, dim=-1)
