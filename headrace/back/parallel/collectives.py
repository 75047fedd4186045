"""Collectives over one axis of the mesh. An axis of one rank costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class Partial:
    """This rank's share of a sum over the axis that is still to be taken: by whoever adds it to the
    residual."""

    share: torch.Tensor
    axis: Axis

    def total(self) -> torch.Tensor:
        """The sum, in place."""
        return all_reduce(self.share, self.axis)


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of `x` over the axis, in place."""
    if axis.size == 1:
        return x
    if axis.summing is not None and axis.summing.takes(x):
        return axis.summing.all_reduce(x)
    if axis.ordered and axis.size > 2:
        return _ordered_sum(x, axis)
    dist.all_reduce(x, group=axis.group)
    return x


def _ordered_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Libraries cut long messages and sum each piece in an order of its own; two summands have one
    order only."""
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return x.copy_(total)


def all_parts(x: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """The axis's tensors in rank order; x is contiguous."""
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x, group=axis.group)
    return parts


def all_to_all(x_WX: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What each rank of the axis has for this one, in rank order; x_WX[r], contiguous, goes to rank
    r."""
    got_WX = torch.empty_like(x_WX)
    dist.all_to_all_single(got_WX, x_WX, group=axis.group)
    return got_WX


def reduce_scatter(x_WX: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the axis of what each rank has for this one; x_WX is contiguous."""
    total_X = torch.empty_like(x_WX[0])
    dist.reduce_scatter(total_X, list(x_WX.unbind(0)), group=axis.group)
    return total_X


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The axis's tensors side by side along the last dimension, in rank order."""
    if axis.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, dim=-1)
