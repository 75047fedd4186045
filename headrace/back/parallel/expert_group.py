"""The ranks of all engine cores that share out the routed experts: how they meet, and what they
have for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from headrace.back.parallel.mesh import Axis, Mesh
from headrace.back.parallel.process_groups import new_group
from headrace.back.parallel.rounds import MixtureRounds, SocketBell
from headrace.base.errors import EngineDead

JOIN_TIMEOUT_S = 600.0
"""Until all have started; and until one that is late comes to a round."""


@dataclass(frozen=True, eq=False)
class ExpertGroup:
    """The group as one rank sees it. `mesh`: its mesh with "dp" and "ep" over all cores."""

    mesh: Mesh
    rounds: MixtureRounds
    bell: SocketBell


def join_experts(
    mesh: Mesh,
    *,
    cores: int,
    core: int,
    folder: str,
    device: str,
    exchange: str,
    redundant: int | None,
) -> ExpertGroup:
    """Meets the ranks of the other cores in a folder that is new. EngineDead if they do not come.
    `core`: this rank's; `device`: its kind; `exchange` and `redundant`: see Mesh."""
    alike = mesh.tp.size
    size, rank = cores * alike, core * alike + mesh.tp.rank
    place = Axis(name="ep", size=size, rank=rank, group=dist.ProcessGroup(rank, size))
    bell = SocketBell(folder, place)  # before anybody can ring for it
    try:
        store = dist.FileStore(f"{folder}/meeting", size)
        groups = {
            name: new_group(store, rank, size, backend=backend, name=name, timeout_s=JOIN_TIMEOUT_S)
            for name, backend in (("rounds", "gloo"), ("tokens", _backend(device)))
        }
    except RuntimeError as error:
        why = str(error).strip().split("\n", 1)[0]
        raise EngineDead(f"rank {rank} of {size} that share out the experts: {why}") from error
    rounds = MixtureRounds(replace(place, group=groups["rounds"]), alike=alike, bell=bell)
    axis = replace(place, group=groups["tokens"])
    return ExpertGroup(
        mesh=replace(
            mesh,
            dp=Axis(name="dp", size=cores, rank=core, group=axis.group),
            ep=axis,
            token_exchange=exchange,
            redundant_experts=redundant,
            rounds=rounds,
        ),
        rounds=rounds,
        bell=bell,
    )


def _backend(device: str) -> str:
    return "gloo" if device == "cpu" else "nccl"
