"""PAR-06: engine cores beside those that are always there: begun, told to end, begun again when they die."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.launch.api_process import failure_at
from headrace.launch.children import ManagedProcess, ProcessOwner
from headrace.launch.replicas import ENDING_S, ElasticCores
from headrace.launch.topology import Report


class Child:
    """Our end of a core's stream, and the core's."""

    def __init__(self) -> None:
        self.status, self.theirs = socket.socketpair()
        self.process = self
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = True

    @property
    def was_told(self) -> bool:
        self.theirs.setblocking(False)
        try:
            return self.theirs.recv(1) == b""
        except BlockingIOError:
            return False


class Parent:
    """Starts what is added, as the supervisor does."""

    def __init__(self, folder: Path, *, is_group: bool = False) -> None:
        self.ended: list[ManagedProcess] = []
        self.added: list[ManagedProcess] = []
        self.children: list[Child] = []
        self.now = 100.0
        self.cores = ElasticCores(
            self.make,
            lambda index: str(folder / f"core-{index}.sock"),
            fixed=1,
            most=3,
            is_group=is_group,
            clock=lambda: self.now,
        )
        supervisor: Any = self
        self.cores.begin(supervisor)

    def make(self, index: int, owner: ProcessOwner) -> ManagedProcess:
        return ManagedProcess(f"engine core {index}", self.start, is_core=True, owner=owner)

    def start(self, managed: ManagedProcess) -> Any:
        self.children.append(Child())
        return self.children[-1]

    def add(self, managed: ManagedProcess) -> None:
        self.added.append(managed)
        managed.child = managed.start(managed)

    def ask(self, count: int) -> None:
        self.cores.asked(Report(replicas=count))

    def end_fellows(self, managed: ManagedProcess) -> None:
        self.ended.append(managed)

    def dies(self, managed: ManagedProcess, status: int) -> bool:
        """Whether it is to be started again."""
        managed.child = None
        self.cores.on_death(managed, status)
        return managed.restart_at is not None


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path)
    yield parent
    for child in parent.children:
        child.status.close()
        child.theirs.close()


def test_cores_are_begun_and_told_to_end(parent: Parent) -> None:
    parent.ask(9)
    names = [managed.name for managed in parent.added]
    assert names == ["engine core 1", "engine core 2"], "no more than there may be"
    first, second = (managed.child for managed in parent.added)
    parent.ask(2)
    assert isinstance(first, Child) and not first.was_told
    assert isinstance(second, Child) and second.was_told
    assert not parent.dies(parent.added[1], 0)
    parent.ask(3)
    assert [managed.name for managed in parent.added] == [*names, "engine core 2"]


def test_one_that_is_wanted_again_before_it_has_ended_is_begun_again(parent: Parent) -> None:
    parent.ask(2)
    parent.ask(1)
    parent.ask(2)
    assert len(parent.added) == 1 and parent.dies(parent.added[0], 0)


def test_one_that_served_is_begun_again_and_one_that_cannot_start_says_why(
    parent: Parent, tmp_path: Path
) -> None:
    parent.ask(3)
    served, failed = parent.added
    served.ready, failed.error = True, "no room for its weights"
    assert parent.dies(served, -9)
    parent.ask(3)
    assert len(parent.added) == 2, "it waits to be begun again"
    assert not parent.dies(failed, 2)
    failure = failure_at(str(tmp_path / "core-2.sock"))
    assert failure.read_text() == "no room for its weights"
    parent.ask(3)
    assert parent.added[-1].name == "engine core 2" and not failure.exists()
    parent.ask(1)
    parent.ask(2)
    assert parent.added[-1].name == "engine core 1", "one that was to begin again was forgotten"


def test_one_that_does_not_end_is_killed(parent: Parent) -> None:
    parent.ask(2)
    assert parent.cores.due() == math.inf
    parent.ask(1)
    (child,) = parent.children
    assert parent.cores.due() == 100.0 + ENDING_S
    parent.cores.turn()
    assert child.was_told and not child.was_killed
    parent.now += ENDING_S
    parent.cores.turn()
    assert child.was_killed and parent.cores.due() == math.inf
    assert not parent.dies(parent.added[0], -9)


def test_one_of_a_group_that_dies_is_not_begun_again_and_ends_the_others(tmp_path: Path) -> None:
    """PAR-07: nor is one that ends with another; one that has not joined ends nobody."""
    parent = Parent(tmp_path, is_group=True)
    parent.ask(3)
    first, second = parent.added
    second.error = "no room for its weights"
    assert not parent.dies(second, 2) and not parent.ended
    first.ready = second.ready = True
    assert not parent.dies(first, -9)
    assert parent.ended == [first]
    parent.ask(2)
    begun = parent.added[-1]
    begun.ready, begun.ends_with = True, first
    assert not parent.dies(begun, -9) and parent.ended == [first]
    for child in parent.children:
        child.status.close()
        child.theirs.close()
