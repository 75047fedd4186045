"""The parent of all processes outlives whatever its children do."""

from __future__ import annotations

import os
import socket
import subprocess

import msgspec

from headrace.base.config.tree import Options
from headrace.launch.resolve import resolve
from headrace.launch.supervisor import Seat, State, Supervisor
from headrace.launch.topology import Child, RuntimeFolder
from tests.launch.test_resolve import CPU, MODEL


def dead_before_it_is_watched(_: Seat) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["true"], stdin=theirs)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ours.setblocking(False)
    return Child(name="core", process=process, status=ours)


def test_a_child_that_dies_before_it_is_watched_is_one_death() -> None:
    """Its end and the end of its reports arrive in the same turn, in this order."""
    folder = RuntimeFolder()
    with socket.socket() as listener:
        resolved = resolve(msgspec.convert({}, Options), MODEL, CPU)
        supervisor = Supervisor(resolved, folder, listener, lambda seats: None)
        seat = Seat("core", dead_before_it_is_watched, is_core=True)
        supervisor._seats = [seat]
        supervisor.state = State.SERVING
        supervisor._start(seat)
        for deaths in (1, 2):
            supervisor._turn()
            assert (seat.child is None, supervisor.restarts) == (deaths == 2, deaths)
    supervisor._kill_all()
    folder.close()
    assert supervisor.exit_status == 0
