"""The ranks of all engine cores that share out the routed experts: how they meet, and what they
have for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch.distributed as dist

from headrace.back.parallel.mesh import Axis, Mesh
from headrace.back.parallel.process_groups import end_group, new_group
from headrace.back.parallel.rounds import MixtureRounds, Ring, SocketBell
from headrace.base.errors import EngineDead

JOIN_TIMEOUT_S = 1800.0
"""Until all have started; and until one that is late comes to a round."""


class PlacedExperts(Protocol):
    """The experts of a mixture on this rank (layers/moe/balance.py)."""

    def leave_to(self, ranks: int) -> None:
        """Every expert comes to one of the first so many ranks; all ranks call it."""
        ...

    def share_with(self, axis: Axis) -> None:
        """The ranks of this axis have them from now on; all call it."""
        ...


ALONE = Axis(name="ep")


@dataclass(frozen=True, eq=False)
class Meeting:
    """Ranks that have met. `numbers`: over which numbers on the host are sent, `tokens`: tokens and
    experts; axes of one: this rank is alone."""

    numbers: Axis = ALONE
    tokens: Axis = ALONE
    bell: SocketBell | None = None

    def ring(self, period: int) -> None:
        """See Bell."""
        if self.bell is not None:
            self.bell.ring(period)

    def end(self) -> None:
        """They part."""
        if self.bell is not None:
            self.bell.close()
        for axis in (self.numbers, self.tokens):
            if axis.group is not None:
                end_group(axis.group)


@dataclass(eq=False)
class ExpertGroup:
    """The group as one rank sees it. `mesh`: its mesh with "dp" and "ep" over all cores. `orders`:
    takes the rings of the others, once it is set; `parted`: who has met before."""

    mesh: Mesh
    rounds: MixtureRounds
    meeting: Meeting
    core: int
    device: str
    orders: Callable[[Ring], None] = field(default=lambda ring: None)
    parted: list[Meeting] = field(default_factory=list)

    def listen(self, heard: Callable[[Ring], None]) -> None:
        """Rings go there from now on, of other groups too."""
        self.orders = heard
        if self.meeting.bell is not None:
            self.meeting.bell.listen(heard)

    def become(self, cores: int, folder: str, experts: Sequence[PlacedExperts]) -> None:
        """A group of the first so many cores, which meet in this folder; those of the present group
        and those that come do it at the same time, with nothing to compute. A core that is not
        among them keeps what it has."""
        ranks = cores * self.mesh.tp.size
        self.rounds.rest()
        while self.parted:  # those that left it are long gone
            self.parted.pop().end()
        if ranks < self.meeting.tokens.size:
            for one in experts:
                one.leave_to(ranks)
        if self.core >= cores:
            return
        rank = self.core * self.mesh.tp.size + self.mesh.tp.rank
        place = replace(self.meeting.numbers, size=ranks, rank=rank, group=_NOBODY)
        before, self.meeting = self.meeting, meet(folder, place, self.device)
        self.rounds.renew(self.meeting.numbers, self.meeting)
        for one in experts:
            one.share_with(self.meeting.tokens)
        self.parted.append(before)
        self.listen(self.orders)


_NOBODY = dist.ProcessGroup(0, 1)
"""In place of a group that is still to meet."""


def join_experts(
    mesh: Mesh,
    *,
    cores: int,
    core: int,
    folder: str,
    least: int,
    device: str,
    exchange: str,
    redundant: int | None,
) -> ExpertGroup:
    """Meets the ranks of the other cores in a folder that is new; without one this rank stays
    alone. EngineDead if they do not come. `core`: this rank's; `least`: cores that are always
    there, where others come and go; `device`: its kind; `exchange` and `redundant`: see Mesh."""
    alike = mesh.tp.size
    rank = core * alike + mesh.tp.rank
    place = Axis(name="ep", size=cores * alike, rank=rank, group=_NOBODY)
    meeting = meet(folder, place, device) if folder else Meeting()
    rounds = MixtureRounds(meeting.numbers, alike=alike, bell=meeting)
    shared = replace(
        mesh,
        dp=Axis(name="dp", size=cores, rank=core, group=_NOBODY),
        ep=meeting.tokens if folder else place,
        token_exchange=exchange,
        redundant_experts=redundant,
        rounds=rounds,
        least_ranks=least * alike,
        alone=not folder,
    )
    return ExpertGroup(mesh=shared, rounds=rounds, meeting=meeting, core=core, device=device)


def meet(folder: str, place: Axis, device: str) -> Meeting:
    """Waits for the other ranks of this place's axis; EngineDead if they do not come."""
    bell = SocketBell(folder, place)  # before anybody can ring for it
    size, rank = place.size, place.rank
    try:
        store = dist.FileStore(f"{folder}/meeting", size)
        numbers, tokens = (
            new_group(
                store,
                rank,
                size,
                backend=backend,
                name=f"{folder}/{name}",
                timeout_s=JOIN_TIMEOUT_S,
            )
            for name, backend in (
                ("numbers", "gloo"),
                ("tokens", "gloo" if device == "cpu" else "nccl"),
            )
        )
    except RuntimeError as error:
        why = str(error).strip().split("\n", 1)[0]
        raise EngineDead(f"rank {rank} of {size} that share out the experts: {why}") from error
    return Meeting(
        numbers=replace(place, group=numbers), tokens=replace(place, group=tokens), bell=bell
    )
