"""A step that takes suspiciously long is told before it ends the process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from headrace.launch.watchdog import Watchdog


@pytest.fixture
def status() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    yield ours
    ours.close()
    theirs.close()


def test_a_slow_step_is_told_once_and_taken_back_when_it_is_done(status: socket.socket) -> None:
    """Defect: a hung step kept health green for 300 s."""
    words: list[float | None] = []
    dog = Watchdog(1e6, status, slow_after_s=lambda: 500.0, on_slow=words.append)
    dog.since = time.monotonic()
    now = time.monotonic()
    dog.look(now + 499.0)
    assert words == []
    dog.look(now + 600.0)
    dog.look(now + 700.0)
    assert words == [pytest.approx(600.0, abs=1.0)]
    dog.since = None
    dog.look(now + 701.0)
    dog.look(now + 702.0)
    assert words[1:] == [None]


def test_a_step_behind_a_slow_one_has_a_time_of_its_own(status: socket.socket) -> None:
    words: list[float | None] = []
    dog = Watchdog(1e6, status, slow_after_s=lambda: 500.0, on_slow=words.append)
    dog.since = time.monotonic()
    now = time.monotonic()
    dog.look(now + 600.0)
    dog.since = time.monotonic()
    dog.look(now + 300.0)
    assert words == [pytest.approx(600.0, abs=1.0), None]
