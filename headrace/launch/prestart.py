"""Starts a child process before its arguments are known: its imports run beside the parent's own
imports and option resolution, instead of a third of a second after them.

`prestart` starts it; `import_ahead` has it import more; `take_prestarted` passes the arguments, all
over its standard input, which child_entry.py reads. A process that nobody takes reads the end of
its input and ends. This module imports as little as possible, because it runs before everything
else.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base import env

CORE_MODULE = "headrace.launch.core_process"
ENTRY_MODULE = "headrace.launch.child_entry"
ARGUMENTS_LATER = "--arguments-on-stdin"
"""Placeholder for arguments that follow on standard input."""
IMPORT = b"+"
"""Begins a line on standard input that names a module to be imported."""
_NO_KEYS = {"HEADRACE_API_KEYS": "", "HEADRACE_ADMIN_KEY": ""}  # children know digests only


@dataclass(frozen=True)
class PrestartedProcess:
    """A process and our end of its status socket."""

    process: subprocess.Popen[bytes]
    status: socket.socket


_waiting: dict[str, tuple[PrestartedProcess, int]] = {}
"""Module -> its process, and the number of its end of the status socket."""


def prestart(module: str) -> None:
    """Starts a process for `module` with this environment, for a parent that outlives it."""
    if module in _waiting:
        return
    ours, theirs = socket.socketpair()
    with theirs:
        process = start(module, ARGUMENTS_LATER, status=theirs, stdin=subprocess.PIPE)
        _waiting[module] = PrestartedProcess(process, ours), theirs.fileno()


def import_ahead(module: str, name: str) -> None:
    """Has the waiting process of `module` import `name` too; one that has ended is no error."""
    entry = _waiting.get(module)
    if entry is None:
        return
    pipe = entry[0].process.stdin
    assert pipe is not None
    with contextlib.suppress(OSError):
        pipe.write(IMPORT + name.encode() + b"\n")
        pipe.flush()


def take_prestarted(
    module: str, arguments: Sequence[str], *, plain: bool
) -> PrestartedProcess | None:
    """Runs the waiting process of `module` with `arguments`; None if there is none that can.
    `plain`: the child needs nothing beyond this process's environment and inherited files."""
    entry = _waiting.pop(module, None)
    if entry is None:
        return None
    started, status_fd = entry
    try:
        if plain and started.process.poll() is None:
            assert started.process.stdin is not None
            with started.process.stdin as pipe:
                pipe.write("\0".join((*arguments, *status_arguments(status_fd))).encode())
            return started
    except OSError:
        pass
    _end(started)
    return None


def discard_prestarted() -> None:
    """Ends the processes that still wait."""
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
    """`python -m module` through child_entry.py. `status`: the child's end of a pair."""
    env.set_default("OPENBLAS_NUM_THREADS", "1")  # numpy's: never used, 0.06 s and 30 MB to start
    return subprocess.Popen(
        [*env.python_command(), "-m", ENTRY_MODULE, module, *arguments],
        stdin=stdin,
        pass_fds=(status.fileno(), *pass_fds),
        env=env.child_environment(**_NO_KEYS, **(environment or {})),
    )


def status_arguments(status_fd: int) -> tuple[str, ...]:
    """The arguments that name a child's end of the status socket."""
    return "--status-fd", str(status_fd)


def _end(started: PrestartedProcess) -> None:
    started.process.kill()
    if started.process.stdin is not None:
        started.process.stdin.close()
    started.process.wait()
    started.status.close()
