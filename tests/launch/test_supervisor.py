"""The parent of all processes outlives whatever its children do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import msgspec
import pytest

from headrace.base.config.tree import Options
from headrace.base.process_stop import CHECK_S
from headrace.launch.children import ManagedProcess
from headrace.launch.resolve import resolve
from headrace.launch.supervisor import (
    API_SILENCE_S,
    SILENCE_S,
    ServerPhase,
    Supervisor,
)
from headrace.launch.topology import ChildProcess, RuntimeFolder
from tests.launch.test_resolve import CPU, MODEL


def dead_before_it_is_watched(_: ManagedProcess) -> ChildProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["true"], stdin=theirs)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ours.setblocking(False)
    return ChildProcess(name="core", process=process, status=ours)


def test_a_child_that_dies_before_it_is_watched_is_one_death() -> None:
    """Its end and the end of its reports arrive in the same turn, in this order."""
    folder = RuntimeFolder()
    managed = ManagedProcess("core", dead_before_it_is_watched, is_core=True)
    supervisor = supervised(managed, folder)
    for deaths in (1, 2):
        supervisor._turn()
        assert (managed.child is None, supervisor.restarts) == (deaths == 2, deaths)
    supervisor._kill_all()
    folder.close()
    assert supervisor.exit_status == 0


def supervised(child: ManagedProcess, folder: RuntimeFolder) -> Supervisor:
    server = resolve(msgspec.convert({}, Options), MODEL, CPU).server
    supervisor = Supervisor(server, [child], folder, lambda processes: None)
    supervisor.phase = ServerPhase.SERVING
    supervisor._start(child)
    return supervisor


def sleeping(_: ManagedProcess) -> ChildProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["sleep", "600"], stdin=theirs)
    ours.setblocking(False)
    return ChildProcess(name="child", process=process, status=ours)


@pytest.mark.parametrize("is_core", [True, False])
def test_a_stopped_child_is_killed_at_the_second_look(is_core: bool) -> None:
    folder = RuntimeFolder()
    child = ManagedProcess("child", sleeping, is_core=is_core)
    supervisor = supervised(child, folder)
    assert child.child is not None
    process = child.child.process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    child.heard_at = 100.0
    supervisor._check_alive(child, 100.1)
    assert process.poll() is None, "a first look proves nothing"
    supervisor._check_alive(child, 100.1 + CHECK_S)
    assert process.wait(300) == -signal.SIGKILL
    supervisor._kill_all()
    folder.close()
    assert 2 * CHECK_S <= 1.0, "it is noticed within a second"


@pytest.mark.parametrize(("is_core", "limit_s"), [(True, SILENCE_S), (False, API_SILENCE_S)])
def test_a_child_without_heartbeats_is_killed_once_it_has_sent_one(
    is_core: bool, limit_s: float
) -> None:
    folder = RuntimeFolder()
    child = ManagedProcess("child", sleeping, is_core=is_core)
    supervisor = supervised(child, folder)
    assert child.child is not None
    process = child.child.process
    supervisor._check_alive(child, 1e9)
    assert process.poll() is None, "it is still starting"
    child.heard_at = 100.0
    supervisor._check_alive(child, 100.0 + limit_s - 0.1)
    assert process.poll() is None
    supervisor._check_alive(child, 100.0 + limit_s)
    assert process.wait(300) == -signal.SIGKILL
    supervisor._kill_all()
    folder.close()


def test_those_that_cannot_go_on_alone_start_again_together() -> None:
    """PAR-10: one death is not another one's reason to end what has started again."""
    folder = RuntimeFolder()
    one, other = (ManagedProcess(name, sleeping, is_core=True) for name in ("one", "other"))
    one.fellows, other.fellows = [other], [one]
    supervisor = supervised(one, folder)
    supervisor._processes.append(other)
    supervisor._start(other)
    first = [managed.child.process for managed in (one, other) if managed.child is not None]
    first[0].kill()
    while supervisor.restarts < 2 or not (one.child and other.child):
        supervisor._turn()
    assert [process.wait() for process in first] == [-signal.SIGKILL] * 2
    assert supervisor.restarts == 2 and one.ends_with is other.ends_with is None
    for managed in (one, other):
        assert managed.child is not None and managed.child.process.poll() is None
    supervisor._kill_all()
    folder.close()
