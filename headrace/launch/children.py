"""The places in the process tree of a server, and what is started in each: engine cores and API
processes. The supervisor watches them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.base.config.resolved import Resolved
from headrace.base.process_stop import StopDetector
from headrace.base.telemetry import log as logs
from headrace.launch import api_process
from headrace.launch.api_process import ApiSpec
from headrace.launch.expert_group import MeetingPlaces
from headrace.launch.kv_events import remove_with
from headrace.launch.prestart import CORE_MODULE
from headrace.launch.topology import ChildProcess, Report, RuntimeFolder, core_environment, spawn

CRASH_LIMIT = 5
CRASH_WINDOW_S = 60.0
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)


class ProcessOwner(Protocol):
    """Who decides what becomes of a process, where the supervisor does not."""

    def on_ready(self, managed: ManagedProcess) -> None:
        """It has started; `managed.report` says with what."""
        ...

    def on_death(self, managed: ManagedProcess, status: int) -> None:
        """It has ended. It is started again if `restart_at` is set, else forgotten."""
        ...


class ManagedProcess:
    """One place in the process tree and its running process, if any. `ready` describes that
    process; `paused` and `asleep` (see Report) are passed on to the process that replaces it.
    `fellows` cannot go on without this one: they are killed when it dies, `ends_with` it."""

    def __init__(
        self,
        name: str,
        start: Callable[[ManagedProcess], ChildProcess],
        *,
        is_core: bool,
        owner: ProcessOwner | None = None,
    ) -> None:
        self.name = name
        self.start = start
        self.is_core = is_core
        self.owner = owner
        self.paused = ""
        self.asleep = False
        self.fellows: list[ManagedProcess] = []
        self.ends_with: ManagedProcess | None = None
        self.child: ChildProcess | None = None
        self.pidfd = -1
        self.ready = False
        self.report: Report | None = None
        self.error: str | None = None
        self.deaths: deque[float] = deque(maxlen=CRASH_LIMIT + 1)
        self.restart_at: float | None = None
        self.heard_at: float | None = None
        self.stop: StopDetector | None = None

    def restart_delay_s(self, now: float) -> float | None:
        """Records a death; seconds until the restart, None after too many recent deaths."""
        self.deaths.append(now)
        recent = sum(1 for at in self.deaths if now - at < CRASH_WINDOW_S)
        return RESTART_DELAYS_S[recent - 1] if recent <= CRASH_LIMIT else None


class CoreProcesses:
    """Makes the engine cores of one model, one for each replica."""

    def __init__(self, resolved: Resolved, folder: RuntimeFolder) -> None:
        self._resolved, self._folder = resolved, folder
        self._spec = folder.write_spec("core", resolved.engine)
        self._places, self._group = MeetingPlaces(folder), list[ManagedProcess]()
        self.is_group = resolved.engine.device.expert_group is not None

    def all(self) -> list[ManagedProcess]:
        """Those that are there at start and always."""
        return [self.make(index) for index in range(self._resolved.replicas)]

    def make(self, index: int, owner: ProcessOwner | None = None) -> ManagedProcess:
        """The core of this number; None: the supervisor owns it. Those of a group end together."""
        remove_with(self._folder, self._resolved.engine.kv, self._folder.socket_path(index))
        environment = core_environment(self._resolved, index)
        words = self._places.words if owner is None else self._places.words_alone
        starter = core_starter(
            self._spec,
            self._folder.socket_path(index),
            environment,
            more=partial(words, index) if self.is_group else tuple,
        )
        managed = ManagedProcess(f"engine core {index}", starter, is_core=True, owner=owner)
        if self.is_group:
            self._group[:] = [one for one in self._group if one.name != managed.name]
            self._group.append(managed)
            managed.fellows = self._group
        return managed


def core_starter(
    spec: str,
    socket_path: str,
    environment: dict[str, str],
    *,
    more: Callable[[], Sequence[str]] = tuple,
) -> Callable[[ManagedProcess], ChildProcess]:
    """Starts the core of this spec; one that was paused or slept when it died is so again. `more`:
    what else each start is told."""

    def start(managed: ManagedProcess) -> ChildProcess:
        words = ["--spec", spec, "--socket", socket_path, "--log-level", logs.level()]
        words += ["--paused", managed.paused, *(["--asleep"] if managed.asleep else []), *more()]
        return spawn("core", CORE_MODULE, *words, die_with_thread=True, environment=environment)

    return start


def api_processes(
    spec: ApiSpec,
    folder: RuntimeFolder,
    listener: socket.socket,
    *,
    admin: socket.socket | None,
    connect_pool: Callable[[], socket.socket] | None = None,
) -> list[ManagedProcess]:
    """The API processes. The first one serves the admin API; each gets an end of a socket to the
    pool of models, if there is one."""
    path = folder.write_spec("api", spec)
    count = spec.server.api_servers
    environment = {}
    if count > 1:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder.make("metrics"))

    def start(index: int, _: ManagedProcess) -> ChildProcess:
        pool = None if connect_pool is None else connect_pool()
        sockets = {
            "--listen-fd": listener,
            "--admin-fd": admin if index == 0 else None,
            "--pool-fd": pool,
        }
        fds = {flag: one.fileno() for flag, one in sockets.items() if one is not None}
        words = [word for flag, fd in fds.items() for word in (flag, str(fd))]
        try:
            return spawn(
                "api",
                api_process.MODULE,
                "--spec",
                path,
                "--log-level",
                logs.level(),
                *words,
                pass_fds=tuple(fds.values()),
                die_with_thread=True,
                environment=environment,
            )
        finally:
            if pool is not None:
                pool.close()

    return [
        ManagedProcess(f"API process {index}", partial(start, index), is_core=False)
        for index in range(count)
    ]
