"""Process groups over which a trainer broadcasts weights: it is rank 0, the workers follow.

A group is made beside the one that the ranks of a model share, as other engines for reinforcement
learning do it: a TCP store at the trainer's address, the group's name before its keys. `join` is
what the trainer calls too.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from headrace.base.errors import Conflict, InvalidRequest
from headrace.base.wire.weights import Group

JOIN_TIMEOUT_S = 300.0


def join(group: Group, rank: int, device: torch.device) -> dist.ProcessGroup:
    """Meets the other members; waits for them at most JOIN_TIMEOUT_S. `rank` 0 is the trainer."""
    backend = group.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend not in ("gloo", "nccl") or (backend == "nccl" and device.type != "cuda"):
        raise InvalidRequest(
            f"backend: {backend!r:.40} given; allowed on {device.type}: gloo"
            + (", nccl" if device.type == "cuda" else ""),
            field="backend",
        )
    if not 0 <= rank < group.world_size:
        raise InvalidRequest(
            f"world_size: {group.world_size} given, and a worker would be rank {rank}",
            field="world_size",
        )
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    address = f"tcp://{group.address}:{group.port}"
    store, _, _ = next(dist.rendezvous(address, rank, group.world_size, timeout=timeout))
    store.set_timeout(timeout)
    members, _ = c10d._new_process_group_helper(
        group.world_size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(group.name, store),
        group_name=group.name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[members] = {i: i for i in range(group.world_size)}
    return members


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sends a tensor from rank 0 to all members, in place."""
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


class WeightGroups:
    """The groups of one worker, by name."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, group: Group) -> None:
        """Conflict if there is one of that name."""
        if group.name in self._groups:
            raise Conflict(f"group_name: {group.name!r:.100} has been joined already")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._groups[group.name] = join(group, group.first_rank + self._rank, self._device)

    def leave(self, name: str) -> None:
        """InvalidRequest if there is none of that name."""
        group = self.named(name)
        del self._groups[name]
        dist.destroy_process_group(group)

    def named(self, name: str) -> dist.ProcessGroup:
        """The group; InvalidRequest lists those there are."""
        if name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise InvalidRequest(
                f"group_name: {name!r:.100} has not been joined; joined are: {known}",
                field="group_name",
            )
        return self._groups[name]
