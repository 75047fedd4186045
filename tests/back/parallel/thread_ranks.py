"""Ranks as threads of one process: collectives over a group of them, for tests of what ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch

from headrace.back.parallel import collectives
from headrace.back.parallel.mesh import Axis


class Meeting:
    """Where the ranks of a group leave what they have and take what the others left."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier = size, Barrier(size)
        self._left: list[Any] = [None] * size

    def swap(self, rank: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has; a copy for each."""
        self._left[rank] = mine.clone()
        self._barrier.wait()
        got = [one.clone() for one in self._left]
        self._barrier.wait()
        return got

    def give_up(self) -> None:
        """The others need not wait."""
        self._barrier.abort()


class Group:
    """The group as one rank sees it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank


class ThreadedCollectives:
    """What parallel/collectives.py asks of torch.distributed."""

    @staticmethod
    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: Group) -> None:
        for part, theirs in zip(parts, group.meeting.swap(group.rank, x), strict=True):
            part.copy_(theirs)

    @staticmethod
    def all_reduce(x: torch.Tensor, group: Group) -> None:
        x.copy_(torch.stack(group.meeting.swap(group.rank, x)).sum(0))

    @staticmethod
    def all_to_all_single(
        got: torch.Tensor,
        x: torch.Tensor,
        got_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
        *,
        group: Group,
    ) -> None:
        sizes = sent_sizes or [len(x) // group.meeting.size] * group.meeting.size
        begin = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        every = group.meeting.swap(group.rank, x)
        begins = group.meeting.swap(group.rank, torch.tensor(begin))
        parts = [
            theirs[int(at[group.rank]) : int(at[group.rank + 1])]
            for theirs, at in zip(every, begins, strict=True)
        ]
        assert got_sizes in (None, [len(part) for part in parts]), got_sizes
        got.copy_(torch.cat(parts).view(got.shape))

    @staticmethod
    def reduce_scatter(total: torch.Tensor, parts: list[torch.Tensor], group: Group) -> None:
        every = group.meeting.swap(group.rank, torch.stack(parts))
        total.copy_(torch.stack([theirs[group.rank] for theirs in every]).sum(0))


def run_threads(
    monkeypatch: pytest.MonkeyPatch, size: int, rank_main: Callable[[int, Callable[..., Axis]], Any]
) -> list[Any]:
    """What `rank_main` returns on each rank. It is called with the rank and what makes its axis: of a name, and
    of so many neighbours (all)."""
    monkeypatch.setattr(collectives, "dist", ThreadedCollectives)
    meetings: dict[tuple[str, int, int], Meeting] = {}

    def axis_of(rank: int) -> Callable[..., Axis]:
        def axis(name: str, of: int = size) -> Axis:
            meeting = meetings.setdefault((name, of, rank // of), Meeting(of))
            group: Any = Group(meeting, rank % of)
            return Axis(name=name, size=of, rank=rank % of, group=group if of > 1 else None)

        return axis

    def run(rank: int) -> Any:
        try:
            return rank_main(rank, axis_of(rank))
        except Exception as error:
            for meeting in list(meetings.values()):
                meeting.give_up()
            return error

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    failed = [one for one in found if isinstance(one, Exception)]
    for error in sorted(failed, key=lambda one: isinstance(one, BrokenBarrierError)):
        raise error  # not that of a rank that waited for it
    return found
