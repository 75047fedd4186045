"""The device mesh: how many ranks each kind of parallelism has, and where this rank stands.

An *axis* is of the mesh, a *dim* is of a tensor. Today tensor parallelism computes; the other axes
exist as sizes, so that a layer that asks for one is written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

AXES = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis as this rank sees it. `group` is None where the axis has one rank."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        assert self.size == 1 or self.group is not None, "an axis of several ranks needs a group"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All axes. `Mesh()` is the mesh of one."""

    tp: Axis = Axis()
    pp: Axis = Axis()
    dp: Axis = Axis()
    ep: Axis = Axis()

    def axis(self, name: str) -> Axis:
        """The axis called `name`."""
        assert name in AXES, name
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}[name]


def tensor_parallel_mesh() -> Mesh:
    """The mesh in which every rank of the initialised default process group shares each layer."""
    assert dist.is_initialized(), "start the process group before the mesh"
    return Mesh(tp=Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD))
