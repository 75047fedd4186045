"""A child process that is started before it is known what it shall do: it makes its imports while its parent makes its
own and resolves the options, a third of a second that would else be spent twice, one after the other.

`begin` starts it and `take` gives it its arguments, by its standard input, of which begin.py knows the other side. One
that nobody takes finds the end of that input and ends. Imports hardly anything: it runs before all else.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base import env

CORE_MODULE = "headrace.launch.core_process"
BEGIN = "headrace.launch.begin"
WAITS = "--waits"
"""Stands for the arguments that are still to come."""
_NO_KEYS = {"HEADRACE_API_KEYS": "", "HEADRACE_ADMIN_KEY": ""}  # children know digests only


@dataclass(frozen=True)
class Started:
    """A process and our end of its status socket."""

    process: subprocess.Popen[bytes]
    status: socket.socket


_waiting: dict[str, tuple[Started, int]] = {}
"""Module -> its process, and the number of its end of the status socket."""


def begin(module: str) -> None:
    """Starts a process that will run `module`, without further environment, for a parent that outlives it."""
    if module in _waiting:
        return
    ours, theirs = socket.socketpair()
    with theirs:
        process = start(module, WAITS, status=theirs, stdin=subprocess.PIPE)
        _waiting[module] = Started(process, ours), theirs.fileno()


def take(module: str, arguments: Sequence[str], *, plain: bool) -> Started | None:
    """Has the waiting process of `module` run with `arguments`; None if there is none, or none that can. `plain`: it
    may be one that was started with this process's environment and files alone."""
    found = _waiting.pop(module, None)
    if found is None:
        return None
    started, status_fd = found
    try:
        if plain and started.process.poll() is None:
            assert started.process.stdin is not None
            with started.process.stdin as pipe:
                pipe.write("\0".join((*arguments, *told(status_fd))).encode())
            return started
    except OSError:
        pass
    _end(started)
    return None


def leave() -> None:
    """Nobody will take what waits."""
    while _waiting:
        _end(_waiting.popitem()[1][0])


def start(
    module: str,
    *arguments: str,
    status: socket.socket,
    pass_fds: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """`python -m module` by way of begin.py. `status`: the child's end of a pair."""
    env.set_default("OPENBLAS_NUM_THREADS", "1")  # numpy's: never used, 0.06 s and 30 MB to start
    return subprocess.Popen(
        [sys.executable, "-m", BEGIN, module, *arguments],
        stdin=stdin,
        pass_fds=(status.fileno(), *pass_fds),
        env=env.child_environment(**_NO_KEYS, **(environment or {})),
    )


def told(status_fd: int) -> tuple[str, ...]:
    """How a child is told its end of the status socket."""
    return "--status-fd", str(status_fd)


def _end(started: Started) -> None:
    started.process.kill()
    if started.process.stdin is not None:
        started.process.stdin.close()
    started.process.wait()
    started.status.close()
