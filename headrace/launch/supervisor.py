"""The parent process of `headrace serve`: starts the engine cores and API processes, watches them, restarts, drains.

It imports no torch and computes nothing: one loop over the children's pidfds and report sockets and the signals, so
that a death is noticed at once (reliability 1.4). States: STARTING until every child is ready, then SERVING, then
DRAINING after SIGTERM or SIGINT (a second one kills). A child that dies while serving is started again with a growing
delay; too many deaths in a minute, or any death while starting, end the server with a status other than 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial

from headrace.base.config.resolved import Resolved
from headrace.base.telemetry import log as logs
from headrace.launch import api_process
from headrace.launch.api_process import ApiSpec
from headrace.launch.early import CORE_MODULE
from headrace.launch.topology import (
    DRAIN_SIGNAL,
    Child,
    Report,
    RuntimeFolder,
    core_environment,
    spawn,
)

log = logging.getLogger(__name__)
CRASH_LIMIT = 5
CRASH_WINDOW_S = 60.0
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
EXIT_GRACE_S = 5.0
SILENCE_S = 5.0
BEAT_CHECK_S = 1.0


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Seat:
    """A place in the process tree and who sits in it. `ready` is about the present occupant, `paused` and `asleep`
    (see Report) are handed on to the next one."""

    def __init__(self, name: str, start: Callable[[Seat], Child], *, is_core: bool) -> None:
        self.name = name
        self.start = start
        self.is_core = is_core
        self.paused = ""
        self.asleep = False
        self.child: Child | None = None
        self.pidfd = -1
        self.ready = False
        self.report: Report | None = None
        self.error: str | None = None
        self.deaths: deque[float] = deque(maxlen=CRASH_LIMIT + 1)
        self.restart_at: float | None = None
        self.heard_at: float | None = None

    def restart_delay_s(self, now: float) -> float | None:
        """Notes a death; seconds until the next try, None when there were too many of late."""
        self.deaths.append(now)
        recent = sum(1 for at in self.deaths if now - at < CRASH_WINDOW_S)
        return RESTART_DELAYS_S[recent - 1] if recent <= CRASH_LIMIT else None


class Supervisor:
    """Runs the process tree. `on_ready(seats)` is called once, when everything is up. The first API process serves
    the administrative plane on `admin`."""

    def __init__(
        self,
        resolved: Resolved,
        folder: RuntimeFolder,
        listener: socket.socket,
        on_ready: Callable[[list[Seat]], None],
        *,
        admin: socket.socket | None = None,
    ) -> None:
        self.state = State.STARTING
        self.exit_status = 0
        self.restarts = 0
        self._resolved = resolved
        self._folder = folder
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._stop_at: float | None = None
        self._turned_at = time.monotonic()
        self._signals_in, self._signals_out = socket.socketpair()
        self._seats = [
            *_core_seats(resolved, folder),
            *_api_seats(resolved, folder, listener, admin),
        ]

    def run(self) -> int:
        """Serves until it is told to stop, or cannot go on; returns the exit status."""
        self._catch_signals()
        try:
            for seat in self._seats:
                self._start(seat)
            while self.state is not State.STOPPING:
                self._turn()
        finally:
            self._kill_all()
        return self.exit_status

    def _catch_signals(self) -> None:
        self._signals_in.setblocking(False)
        self._signals_out.setblocking(False)
        signal.set_wakeup_fd(self._signals_in.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._signals_out, selectors.EVENT_READ, self._signalled)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if key.fd in self._selector.get_map():  # else an event before it ended its child
                key.data()
        now = time.monotonic()
        stopped = (
            now - self._turned_at > SILENCE_S
        )  # we were: what was silent meanwhile proves nothing
        self._turned_at = now
        for seat in self._seats:
            if stopped and seat.heard_at is not None:
                seat.heard_at = now
            if seat.restart_at is not None and now >= seat.restart_at:
                seat.restart_at = None
                self._start(seat)
            self._check_beat(seat, now)
        if self._stop_at is not None and now >= self._stop_at:
            log.warning("the drain took too long; what still runs is killed")
            self.state = State.STOPPING

    def _check_beat(self, seat: Seat, now: float) -> None:
        """A core whose watchdog has fallen silent is stopped or wedged as a whole: it is killed, then restarted.

        The watchdog beats in a thread of its own, so that a long step does not silence it.
        """
        if seat.child is None or seat.heard_at is None or now - seat.heard_at < SILENCE_S:
            return
        log.error("%s has been silent for %g s; it is killed", seat.name, now - seat.heard_at)
        seat.heard_at = None
        seat.child.process.kill()

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        times = [seat.restart_at for seat in self._seats if seat.restart_at is not None]
        times += [now + BEAT_CHECK_S for seat in self._seats if seat.heard_at is not None]
        if self._stop_at is not None:
            times.append(self._stop_at)
        return max(0.0, min(times) - now) if times else None

    def _start(self, seat: Seat) -> None:
        seat.child = seat.start(seat)
        seat.ready, seat.report, seat.error, seat.heard_at = False, None, None, None
        seat.pidfd = os.pidfd_open(seat.child.process.pid)
        self._selector.register(seat.pidfd, selectors.EVENT_READ, lambda: self._died(seat))
        self._selector.register(
            seat.child.status, selectors.EVENT_READ, lambda: self._reported(seat)
        )

    def _reported(self, seat: Seat) -> None:
        assert seat.child is not None
        reports = seat.child.reports()
        for found in reports:
            if seat.is_core:
                seat.heard_at = time.monotonic()
            if found.log_level:
                logs.set_level(found.log_level)
            if found.stop and self.state is State.SERVING:
                self._drain()
            if found.paused is not None:
                seat.paused, seat.asleep = found.paused, found.asleep
            if found.beat or found.log_level or found.stop or found.paused is not None:
                continue
            seat.error = found.error
            seat.ready = found.ready
            seat.report = found
        if not reports:  # end of file: the pidfd tells the rest
            with contextlib.suppress(KeyError):
                self._selector.unregister(seat.child.status)
        if self.state is State.STARTING and all(seat.ready for seat in self._seats):
            self.state = State.SERVING
            self._on_ready(self._seats)

    def _died(self, seat: Seat) -> None:
        child = seat.child
        assert child is not None
        if child.status in self._selector.get_map():
            self._reported(seat)
        self._forget(seat, child)
        status = child.process.wait()
        for gauge in self._folder.path.glob(f"metrics/gauge_live*_{child.process.pid}.db"):
            gauge.unlink()  # what a dead process had in flight counts no more
        if self.state is State.DRAINING:
            if not any(s.child for s in self._seats if not s.is_core):
                self.state = State.STOPPING
            return
        if self.state is State.STARTING:
            why = seat.error or f"{seat.name} died while starting (exit status {status})"
            self._give_up(why, exit_status=2 if seat.error else 1)
            return
        self._restart(seat, f"{seat.name} died (exit status {status})")

    def _restart(self, seat: Seat, what: str) -> None:
        now = time.monotonic()
        delay_s = seat.restart_delay_s(now)
        if delay_s is None:
            self._give_up(
                f"{what} more than {CRASH_LIMIT} times in {CRASH_WINDOW_S:g} s; giving up",
                exit_status=1,
            )
            return
        self.restarts += 1
        log.error("%s; starting it again in %g s", what, delay_s)
        seat.restart_at = now + delay_s

    def _give_up(self, why: str, *, exit_status: int) -> None:
        print(f"headrace: {why}", file=sys.stderr, flush=True)
        self.exit_status = exit_status
        self.state = State.STOPPING

    def _forget(self, seat: Seat, child: Child) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.status)
        self._selector.unregister(seat.pidfd)
        os.close(seat.pidfd)
        child.status.close()
        seat.child = None

    def _signalled(self) -> None:
        self._signals_out.recv(64)
        if self.state is not State.SERVING:
            self.state = State.STOPPING  # not serving yet, or the second signal
            return
        self._drain()

    def _drain(self) -> None:
        self.state = State.DRAINING
        server = self._resolved.server
        timeout_s = server.pre_drain_s + server.shutdown_timeout_s
        log.info("draining: running requests may finish within %g s", timeout_s)
        self._stop_at = time.monotonic() + timeout_s + EXIT_GRACE_S
        for seat in self._seats:
            seat.restart_at = None
            if seat.child is not None and not seat.is_core:
                seat.child.process.send_signal(DRAIN_SIGNAL)

    def _kill_all(self) -> None:
        """No orphans, whatever the way out: cores hold nothing that a signal could lose."""
        children = [seat.child for seat in self._seats if seat.child is not None]
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()
            child.status.close()
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._signals_in.close()
        self._signals_out.close()


def _core_seats(resolved: Resolved, folder: RuntimeFolder) -> list[Seat]:
    spec = folder.write_spec("core", resolved.engine)
    return [
        Seat(
            f"engine core {index}",
            _core_starter(spec, folder.socket_path(index), core_environment(resolved, index)),
            is_core=True,
        )
        for index in range(resolved.replicas)
    ]


def _core_starter(
    spec: str, socket_path: str, environment: dict[str, str]
) -> Callable[[Seat], Child]:
    arguments = ("--spec", spec, "--socket", socket_path)
    return lambda seat: spawn(
        *("core", CORE_MODULE, *arguments, "--log-level", logs.level(), "--paused", seat.paused),
        *(["--asleep"] if seat.asleep else []),
        die_with_thread=True,
        environment=environment,
    )


def _api_seats(
    resolved: Resolved,
    folder: RuntimeFolder,
    listener: socket.socket,
    admin: socket.socket | None,
) -> list[Seat]:
    paths = [folder.socket_path(index) for index in range(resolved.replicas)]
    spec = ApiSpec(
        text=resolved.text,
        server=resolved.server,
        socket_paths=paths,
        heartbeat_timeout_s=SILENCE_S,
        engine=resolved.engine,
        decisions=resolved.decisions,
    )
    path = folder.write_spec("api", spec)
    count = resolved.server.api_servers
    environment = {}
    if count > 1:
        metrics = folder.path / "metrics"
        metrics.mkdir(mode=0o700)
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)

    def start(index: int, _: Seat) -> Child:
        fds = [listener.fileno()]
        arguments = ["--spec", path, "--listen-fd", str(fds[0]), "--log-level", logs.level()]
        if admin is not None and index == 0:
            fds.append(admin.fileno())
            arguments += ["--admin-fd", str(fds[1])]
        return spawn(
            "api",
            api_process.MODULE,
            *arguments,
            pass_fds=tuple(fds),
            die_with_thread=True,
            environment=environment,
        )

    return [
        Seat(f"API process {index}", partial(start, index), is_core=False) for index in range(count)
    ]
