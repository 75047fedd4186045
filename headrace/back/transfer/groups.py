"""Process groups over which a trainer broadcasts weights: it is rank 0, the workers follow.

A group is made beside the one that the ranks of a model share, as other engines for reinforcement
learning do it: a TCP store at the trainer's address, the group's name before its keys. `join` is
what the trainer calls too.

The store lies in the trainer's process. So a worker that waits for tensors asks it now and then
whether the trainer is still there: NCCL itself may never notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from headrace.back.parallel.process_groups import end_group, new_group
from headrace.base import env
from headrace.base.errors import Conflict, InvalidRequest
from headrace.base.wire.weights import Group

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
RECEIVE_TIMEOUT_S = 300.0
POLL_S = 0.0005
ASK_TRAINER_S = 0.5


@dataclass(frozen=True, eq=False)
class JoinedGroup:
    """A group that was joined, and the store at its trainer's address."""

    group: Group
    members: dist.ProcessGroup
    store: dist.Store

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors with those that rank 0 broadcasts, in this order. Conflict if the
        trainer is gone or sends nothing for RECEIVE_TIMEOUT_S; then the group is of no more use."""
        try:
            for work in [self.broadcast(tensor) for tensor in tensors]:
                self._await(work)
                work.wait()
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # all of torch.distributed's are RuntimeErrors
            log.warning("weight group %s: %s", self.group.name, error)
            why = "its trainer is gone" if self._is_alone() else _first_line(error)
            raise Conflict(
                f"group_name: {self.group.name!r:.100}: {why}; the group has been left"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to send a tensor from rank 0 to all members, in place."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self.members.broadcast([tensor], options)

    def _await(self, work: dist.Work) -> None:
        begun = asked = time.monotonic()
        while not work.is_completed():
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - asked > ASK_TRAINER_S:
                asked = now
                self.store.num_keys()  # raises once the trainer's process has ended
            if now - begun > RECEIVE_TIMEOUT_S:
                raise TimeoutError(f"nothing was received for {RECEIVE_TIMEOUT_S:.0f} s")

    def _is_alone(self) -> bool:
        try:
            self.store.num_keys()
        except RuntimeError:
            return True
        return False

    def leave(self) -> None:
        """Ends the group's threads and connections, whether or not the others are there."""
        end_group(self.members)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def join(group: Group, rank: int, device: torch.device) -> JoinedGroup:
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
    if backend == "nccl" and rank:  # a group that fails must neither end this process nor ask on
        env.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        env.set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    address = f"tcp://{group.address}:{group.port}"
    try:
        store, _, _ = next(dist.rendezvous(address, rank, group.world_size, timeout=timeout))
        store.set_timeout(timeout)
        members = new_group(
            store,
            rank,
            group.world_size,
            backend=backend,
            name=group.name,
            timeout_s=JOIN_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise Conflict(f"group {group.name!r:.100} at {address}: {_first_line(error)}") from error
    return JoinedGroup(group, members, store)


def broadcast(tensor: torch.Tensor, group: JoinedGroup) -> None:
    """Sends a tensor from rank 0, which calls this, to all members."""
    group.broadcast(tensor).wait()


class WeightGroups:
    """The groups of one worker, by name."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._groups: dict[str, JoinedGroup] = {}

    def join(self, group: Group) -> None:
        """Conflict if there is one of that name."""
        if group.name in self._groups:
            raise Conflict(f"group_name: {group.name!r:.100} has been joined already")
        self._groups[group.name] = join(group, group.first_rank + self._rank, self._device)

    def leave(self, name: str) -> None:
        """InvalidRequest if there is none of that name."""
        self.named(name).leave()
        del self._groups[name]

    def close(self) -> None:
        """Leaves them all: a name belongs to the process, and would stay taken."""
        for name in list(self._groups):
            self.leave(name)

    def receive(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """See JoinedGroup; a group that fails is left."""
        group = self.named(name)
        try:
            group.receive(tensors)
        except Conflict:
            self.leave(name)
            raise

    def named(self, name: str) -> JoinedGroup:
        """The group; InvalidRequest lists those there are."""
        if name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise InvalidRequest(
                f"group_name: {name!r:.100} has not been joined; joined are: {known}",
                field="group_name",
            )
        return self._groups[name]
