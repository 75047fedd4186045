"""The device mesh: how many ranks each kind of parallelism has, and where this rank stands.

An *axis* is of the mesh, a *dim* is of a tensor. Ranks are numbered stage by stage of a pipeline:
rank = pp * tp_size + tp. The ranks of "ep", where it has several, are those of "tp", which all have
all tokens; or those of all engine cores of "dp", each of which has tokens of its own: rank = dp *
tp_size + tp. An axis of one rank exists as a size, so that a layer that asks for one is written
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.back.parallel.pipe import GroupPipe, Pipe

AXES = ("tp", "pp", "dp", "ep")
OPTIONS = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "ep": "enable_expert_parallel",
    "dcp": "decode_context_parallel_size",
}
"""The option that sets each axis's size."""
SEQUENCE_ROWS = 256
"""Tokens of a step from which on --sequence-parallel divides them: of fewer the residual takes no
memory, and one message is quicker than two."""


class Summing(Protocol):
    """Sums over the ranks by kernels of our own (kernels/all_reduce). All ranks make the same
    calls."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether messages like `x` are summed here; the same on all ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        ...

    def add_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds the sum into the residual, in place, and returns the norm of that
        (kernels/rms_norm)."""
        ...


class Rounds(Protocol):
    """How engine cores whose experts are shared out come to exchange the tokens of the same mixture
    at the same time (parallel/rounds.py). `between` is called ahead of every exchange, by all ranks
    at the same place, with the number of exchanges since they met."""

    between: Callable[[int], None]

    def join(self, name: str, serve: Callable[[int], None]) -> int:
        """The number of the mixture called `name`, the same on all ranks, which join theirs in one
        order. `serve` takes part in an exchange of so many rows a rank with none of its own."""
        ...

    def enter(self, number: int, rows: int) -> int:
        """Waits for the exchange of a mixture in which so many rows of this rank take part; the
        rows of each rank in it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis as this rank sees it. `group` is None where the axis has one rank. `ordered`: sums
    are taken in the order of the ranks, whatever the size of the message. `summing`: who sums the
    messages it takes; else the group.
    """

    name: str = "tp"
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    ordered: bool = False
    summing: Summing | None = None

    @property
    def option(self) -> str:
        """The option that sets its size, for errors."""
        return OPTIONS[self.name]

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        assert self.size == 1 or self.group is not None, "an axis of several ranks needs a group"


@dataclass(frozen=True, kw_only=True)
class ContextSplit:
    """Ranks among those of "tp" that share out each sequence's KV (parallel/context.py): token t
    lies on rank (t // interleave) % size of `axis`. `exchange`: how their results come together."""

    axis: Axis = Axis(name="dcp")
    interleave: int = 1
    exchange: str = "a2a"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All axes. `Mesh()` is the mesh of one. `dcp`: who shares out the KV. `token_exchange`: how
    tokens come to whole experts. `pipe`: what this rank's stage of a pipeline sends to the others;
    None where there is one stage. `redundant_experts`: so many more slots than whole experts, which
    the ranks exchange as loads change; None: these stay where they are. `stage_layers`: the layers
    of each stage, where they are stated. `sequence_rows`: in steps of at least so many tokens each
    rank of "tp" keeps a part of the residual's rows between the layers; 0: in none. `rounds`: when
    experts that the cores of "dp" share out get tokens; None: the ranks of "tp" run in step.
    `least_ranks`: where ranks of "ep" come and go, the fewest there may be, for which each has
    slots; 0: none do. `alone`: this one has not met the others, and exchanges nothing yet."""

    tp: Axis = Axis()
    pp: Axis = Axis(name="pp")
    dp: Axis = Axis(name="dp")
    ep: Axis = Axis(name="ep")
    dcp: ContextSplit = ContextSplit()
    token_exchange: str = "allreduce"
    redundant_experts: int | None = None
    pipe: Pipe | None = None
    stage_layers: tuple[int, ...] = ()
    sequence_rows: int = 0
    rounds: Rounds | None = None
    least_ranks: int = 0
    alone: bool = False

    @property
    def size(self) -> int:
        """Ranks of one copy of the model."""
        return self.tp.size * self.pp.size

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.pp.rank * self.tp.size + self.tp.rank

    @property
    def answers(self) -> bool:
        """Whether this rank tells the core what was sampled: the first of the last stage."""
        return self.tp.rank == 0 and self.pp.rank == self.pp.size - 1

    def axis(self, name: str) -> Axis:
        """The axis called `name`."""
        assert name in AXES, name
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}[name]


def tensor_parallel_mesh(*, ordered: bool = False) -> Mesh:
    """The mesh in which every rank of the initialised default process group shares each layer."""
    assert dist.is_initialized(), "start the process group before the mesh"
    size, rank = dist.get_world_size(), dist.get_rank()
    return Mesh(tp=Axis(size=size, rank=rank, group=dist.group.WORLD, ordered=ordered))


def staged_mesh(stages: int, layers: tuple[int, ...] = (), *, ordered: bool = False) -> Mesh:
    """The mesh of so many stages, each of which the ranks of one "tp" group share; called by every
    rank of the initialised default process group. `layers`: see Mesh.stage_layers."""
    if stages == 1:
        return tensor_parallel_mesh(ordered=ordered)
    assert dist.is_initialized(), "start the process group before the mesh"
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world % stages == 0, (world, stages)
    size = world // stages
    tp, pp = tp_ranks(size, stages), pp_ranks(size, stages)
    # Every rank makes all groups, in one order. What runs back has a group of its own: in one group
    # NCCL orders the messages of two ranks, whichever way they go.
    tp_groups, pp_groups, back_groups = (
        [dist.new_group(list(ranks)) for ranks in all_ranks] for all_ranks in (tp, pp, pp)
    )
    stage, place = divmod(rank, size)
    group = tp_groups[stage] if size > 1 else None
    return Mesh(
        tp=Axis(size=size, rank=place, group=group, ordered=ordered),
        pp=Axis(name="pp", size=stages, rank=stage, group=pp_groups[place]),
        pipe=GroupPipe(
            stage=stage, ranks=pp[place], forth=pp_groups[place], back=back_groups[place]
        ),
        stage_layers=layers,
    )


def with_whole_experts(
    mesh: Mesh, exchange: str = "allreduce", redundant: int | None = None
) -> Mesh:
    """The mesh whose tensor-parallel ranks have whole experts, and not a part of each. `exchange`:
    how tokens come to them (layers/moe/exchange.py); `redundant`: see Mesh."""
    return replace(
        mesh,
        ep=replace(mesh.tp, name="ep", summing=None),
        token_exchange=exchange,
        redundant_experts=redundant,
    )


def with_shared_context(mesh: Mesh, size: int, *, interleave: int, exchange: str) -> Mesh:
    """The mesh in which so many neighbours among the ranks of "tp" share out each sequence's KV;
    called by every rank of the initialised default process group."""
    assert mesh.tp.size % size == 0, (mesh.tp.size, size)
    firsts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
    group = groups[dist.get_rank() // size]
    axis = Axis(name="dcp", size=size, rank=mesh.tp.rank % size, group=group)
    return replace(mesh, dcp=ContextSplit(axis=axis, interleave=interleave, exchange=exchange))


def tp_ranks(size: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that share the layers of each stage."""
    return tuple(tuple(range(stage * size, (stage + 1) * size)) for stage in range(stages))


def pp_ranks(size: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The ranks, stage by stage, that hand on to each other what each place of a stage has."""
    return tuple(tuple(range(place, size * stages, size)) for place in range(size))
