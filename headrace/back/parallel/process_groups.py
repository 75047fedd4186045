"""Process groups beside the one that a process may have been started with: made and ended while it
runs, also where there is no other. Built on what torch.distributed makes its own of."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def new_group(
    store: dist.Store, rank: int, size: int, *, backend: str, name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Meets the others at the store; waits for them, and for every message, at most so long.
    RuntimeError if they do not come."""
    members: dist.ProcessGroup
    members, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[members] = {i: i for i in range(size)}
    return members


def end_group(members: dist.ProcessGroup) -> None:
    """Ends the group's threads and connections, whether or not the others are there."""
    with contextlib.suppress(RuntimeError):  # what the backend says of others that are gone
        members.abort()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(members)
    # an aborted group of NCCL refuses the end, and its name would stay taken
    c10d._world.pg_names.pop(members, None)
    c10d._world.pg_map.pop(members, None)
