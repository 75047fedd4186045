"""Collectives over one axis of the mesh. An axis of one rank costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

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

    def normed_in_parts(
        self,
        add_norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        residual_RE: torch.Tensor,
    ) -> torch.Tensor:
        """What `add_norm` gives for all rows, of which each rank adds and norms its own: the
        residual is that of its R rows."""
        normed_RE = add_norm(sum_of_rows(self.share, self.axis), residual_RE)
        return all_rows(normed_RE, self.axis, self.share.shape[0])


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
    if axis.size == 1:
        return [x]
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x, group=axis.group)
    return parts


def all_to_all(x_WX: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What each rank of the axis has for this one, in rank order; x_WX[r], contiguous, goes to rank
    r."""
    if axis.size == 1:
        return x_WX
    got_WX = torch.empty_like(x_WX)
    dist.all_to_all_single(got_WX, x_WX, group=axis.group)
    return got_WX


def ragged_to_all(x_NX: torch.Tensor, sent: list[int], got: list[int], axis: Axis) -> torch.Tensor:
    """Rows for each rank, in rank order: so many are `sent` to each and `got` from it."""
    if axis.size == 1:
        return x_NX
    got_NX = x_NX.new_empty((sum(got), *x_NX.shape[1:]))
    dist.all_to_all_single(got_NX, x_NX, got, sent, group=axis.group)
    return got_NX


def reduce_scatter(x_WX: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the axis of what each rank has for this one; x_WX is contiguous."""
    if axis.size == 1:
        return x_WX[0]
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


def rows_of_rank(num_rows: int, axis: Axis) -> int:
    """Rows of each rank where ranks have parts of them: equally many, padding on the last ones."""
    return -(-num_rows // axis.size)


def own_rows(x_TE: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A copy [R, E] of this rank's rows, with zeros for padding."""
    count = rows_of_rank(x_TE.shape[0], axis)
    own = x_TE[axis.rank * count : (axis.rank + 1) * count]
    padded = x_TE.new_zeros(count, x_TE.shape[1])
    padded[: own.shape[0]] = own
    return padded


def sum_of_rows(x_TE: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of `x` over the axis, [R, E]: of this rank's rows alone (reduce-scatter). With
    `all_rows` as many bytes as all_reduce."""
    count = rows_of_rank(x_TE.shape[0], axis)
    sent = F.pad(x_TE, (0, 0, 0, count * axis.size - x_TE.shape[0])).contiguous()
    if not axis.ordered and x_TE.device.type == "cuda":
        own = sent.new_empty(count, sent.shape[1])
        dist.reduce_scatter_tensor(own, sent, group=axis.group)
        return own
    parts = torch.empty_like(sent)  # added here, in the order of the ranks
    dist.all_to_all_single(parts, sent, group=axis.group)
    shares = parts.view(axis.size, count, -1)
    total = shares[0].float()
    for share in shares[1:]:
        total += share
    return total.to(x_TE.dtype)


def all_rows(x_RE: torch.Tensor, axis: Axis, num_rows: int) -> torch.Tensor:
    """The ranks' rows one behind the other, without padding: [num_rows, E]."""
    parts = x_RE.new_empty(axis.size * x_RE.shape[0], x_RE.shape[1])
    dist.all_gather_into_tensor(parts, x_RE.contiguous(), group=axis.group)
    return parts[:num_rows]
