"""The parent process of `headrace serve`: starts the engine cores and API processes, watches and
restarts them, drains.

It imports no torch: one loop over the children's pidfds, their report sockets and the signals, so
that a death is noticed at once. Phases: STARTING until every child is ready, then SERVING, then
DRAINING after SIGTERM or SIGINT (a second one ends what runs with an error event, a third one
kills). A child that dies while serving is started
again with a growing delay; too many deaths in a minute, or any death while starting, end the server
with a status other than 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from headrace.base.config.resolved import ServerSpec
from headrace.base.process_stop import CHECK_S, StopDetector
from headrace.base.telemetry import log as logs
from headrace.launch.children import CRASH_LIMIT, CRASH_WINDOW_S, ManagedProcess
from headrace.launch.topology import DRAIN_SIGNAL, ChildProcess, Report, RuntimeFolder

log = logging.getLogger(__name__)
EXIT_GRACE_S = 5.0
SILENCE_S = 5.0
"""A core without a heartbeat for so long is killed; its heartbeats have a thread of their own."""
API_SILENCE_S = 20.0
"""The same of an API process, whose event loop sends them: a long job in it is no hang yet."""


class ServerPhase(Enum):
    """Phases of the server."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class LoopPart(Protocol):
    """What has its own business in the supervisor's loop."""

    def begin(self, supervisor: Supervisor) -> None:
        """The loop begins."""
        ...

    def asked(self, message: Report) -> None:
        """A process wants another number of engine cores."""
        ...

    def turn(self) -> None:
        """Called after every event, and when it is due."""
        ...

    def due(self) -> float:
        """When it is to be called though nothing has happened (time.monotonic)."""
        ...

    def close(self) -> None:
        """The loop is over."""
        ...


class Supervisor:
    """Runs the process tree. `on_ready(processes)` is called once, when all processes there were at
    the start are ready. `part` may add and end processes of its own."""

    def __init__(
        self,
        server: ServerSpec,
        processes: Sequence[ManagedProcess],
        folder: RuntimeFolder,
        on_ready: Callable[[list[ManagedProcess]], None],
        *,
        part: LoopPart | None = None,
    ) -> None:
        self.phase = ServerPhase.STARTING
        self.exit_status = 0
        self.restarts = 0
        self._server = server
        self._part = part
        self._folder = folder
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._stop_at: float | None = None
        self._hurried = False
        self._turned_at = time.monotonic()
        self._signals_in, self._signals_out = socket.socketpair()
        self._processes = list(processes)

    def run(self) -> int:
        """Serves until it is stopped or cannot go on; returns the exit status."""
        self._catch_signals()
        try:
            if self._part is not None:
                self._part.begin(self)
            for managed in self._processes:
                if managed.child is None:
                    self._start(managed)
            while self.phase is not ServerPhase.STOPPING:
                self._turn()
        finally:
            self._kill_all()
        return self.exit_status

    def add(self, managed: ManagedProcess) -> None:
        """Starts one more process, whose owner decides what becomes of it."""
        assert managed.owner is not None, managed.name
        self._processes.append(managed)
        self._start(managed)

    def watch(self, file: socket.socket, events: int, callback: Callable[[], None]) -> None:
        """Calls back when one of these events happens to a socket."""
        if file.fileno() in self._selector.get_map():
            self._selector.modify(file, events, callback)
        else:
            self._selector.register(file, events, callback)

    def unwatch(self, file: socket.socket) -> None:
        """The end of `watch`."""
        self._selector.unregister(file)

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
        self._keep_folder()
        now = time.monotonic()
        # If this process was stopped itself, the silence meanwhile proves nothing.
        was_stopped = now - self._turned_at > SILENCE_S
        self._turned_at = now
        for managed in list(self._processes):
            if was_stopped and managed.heard_at is not None:
                managed.heard_at = now
            if managed.restart_at is not None and now >= managed.restart_at:
                managed.restart_at = None
                self._start(managed)
            self._check_alive(managed, now)
        if self._part is not None:
            self._part.turn()
        if self._stop_at is not None and now >= self._stop_at:
            log.warning("the drain took too long; what still runs is killed")
            self.phase = ServerPhase.STOPPING

    def _keep_folder(self) -> None:
        """Children that start later need what is in the runtime folder."""
        try:
            if self._folder.restore():
                log.error("%s was emptied; what was in it is written again", self._folder.path)
        except OSError as error:
            log.error("%s was emptied and cannot be written again: %s", self._folder.path, error)

    def _check_alive(self, managed: ManagedProcess, now: float) -> None:
        """Kills a child that a signal has stopped or that sends no heartbeats, which means that it
        hangs as a whole. A restart follows."""
        if managed.child is None or managed.heard_at is None or managed.stop is None:
            return
        silence_s = now - managed.heard_at
        if managed.stop.is_stopped(now):
            log.error("%s was stopped by a signal; it is killed", managed.name)
        elif silence_s >= (SILENCE_S if managed.is_core else API_SILENCE_S):
            log.error("%s has been silent for %.1f s; it is killed", managed.name, silence_s)
        else:
            return
        managed.heard_at = None
        managed.child.process.kill()

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        times = [
            managed.restart_at for managed in self._processes if managed.restart_at is not None
        ]
        times += [now + CHECK_S for managed in self._processes if managed.heard_at is not None]
        if self._stop_at is not None:
            times.append(self._stop_at)
        if self._part is not None and self._part.due() < math.inf:
            times.append(self._part.due())
        return max(0.0, min(times) - now) if times else None

    def _start(self, managed: ManagedProcess) -> None:
        managed.child = managed.start(managed)
        managed.ready, managed.report, managed.error = False, None, None
        managed.heard_at = None
        managed.stop = StopDetector(managed.child.process.pid)
        managed.pidfd = os.pidfd_open(managed.child.process.pid)
        self._selector.register(managed.pidfd, selectors.EVENT_READ, lambda: self._died(managed))
        self._selector.register(
            managed.child.status, selectors.EVENT_READ, lambda: self._reported(managed)
        )

    def _reported(self, managed: ManagedProcess) -> None:
        assert managed.child is not None
        reports = managed.child.reports()
        for message in reports:
            managed.heard_at = time.monotonic()
            if message.log_level:
                logs.set_level(message.log_level)
            if message.stop and self.phase is ServerPhase.SERVING:
                self._drain()
            if message.paused is not None:
                managed.paused, managed.asleep = message.paused, message.asleep
            if message.replicas and self._part is not None:
                self._part.asked(message)
            if not message.tells_of_start:
                continue
            managed.error = message.error
            managed.ready = message.ready
            managed.report = message
            if managed.owner is not None and message.ready:
                managed.owner.on_ready(managed)
        if not reports:  # end of file: the pidfd tells the rest
            with contextlib.suppress(KeyError):
                self._selector.unregister(managed.child.status)
        own = [managed for managed in self._processes if managed.owner is None]
        if self.phase is ServerPhase.STARTING and all(managed.ready for managed in own):
            self.phase = ServerPhase.SERVING
            self._on_ready(self._processes)

    def _died(self, managed: ManagedProcess) -> None:
        child = managed.child
        assert child is not None
        if child.status in self._selector.get_map():
            self._reported(managed)
        self._forget(managed, child)
        status = child.process.wait()
        for gauge in self._folder.path.glob(f"metrics/gauge_live*_{child.process.pid}.db"):
            gauge.unlink()  # what a dead process had in flight counts no more
        if managed.owner is not None:
            managed.owner.on_death(managed, status)
            managed.ends_with = None
            if managed.restart_at is None or self.phase is ServerPhase.DRAINING:
                self._processes.remove(managed)
            return
        if self.phase is ServerPhase.DRAINING:
            if not any(s.child for s in self._processes if not s.is_core):
                self.phase = ServerPhase.STOPPING
            return
        if self.phase is ServerPhase.STARTING:
            why = managed.error or f"{managed.name} died while starting (exit status {status})"
            self._give_up(why, exit_status=2 if managed.error else 1)
            return
        other, managed.ends_with = managed.ends_with, None
        if other is None:
            self.end_fellows(managed)
        because = "" if other is None else f" with {other.name}"
        self._restart(managed, f"{managed.name} died{because} (exit status {status})")

    def end_fellows(self, managed: ManagedProcess) -> None:
        """What cannot go on without a process that has died is killed, and starts again with it."""
        for fellow in managed.fellows:
            if fellow is managed or fellow.child is None:
                continue
            if fellow.ends_with is None:
                fellow.ends_with = managed
                fellow.child.process.kill()

    def _restart(self, managed: ManagedProcess, what: str) -> None:
        now = time.monotonic()
        delay_s = managed.restart_delay_s(now)
        if delay_s is None:
            self._give_up(
                f"{what} more than {CRASH_LIMIT} times in {CRASH_WINDOW_S:g} s; giving up",
                exit_status=1,
            )
            return
        self.restarts += 1
        log.error("%s; starting it again in %g s", what, delay_s)
        managed.restart_at = now + delay_s

    def _give_up(self, why: str, *, exit_status: int) -> None:
        print(f"headrace: {why}", file=sys.stderr, flush=True)
        self.exit_status = exit_status
        self.phase = ServerPhase.STOPPING

    def _forget(self, managed: ManagedProcess, child: ChildProcess) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.status)
        self._selector.unregister(managed.pidfd)
        os.close(managed.pidfd)
        child.status.close()
        managed.child = None

    def _signalled(self) -> None:
        self._signals_out.recv(64)
        if self.phase is ServerPhase.SERVING:
            self._drain()
        elif self.phase is ServerPhase.DRAINING and not self._hurried:
            self._hurry()
        else:
            self.phase = ServerPhase.STOPPING  # not serving yet, or the third signal

    def _drain(self) -> None:
        self.phase = ServerPhase.DRAINING
        server = self._server
        timeout_s = server.pre_drain_s + server.shutdown_timeout_s
        log.info("draining: running requests may finish within %g s", timeout_s)
        self._stop_at = time.monotonic() + timeout_s + EXIT_GRACE_S
        for managed in self._processes:
            managed.restart_at = None
        self._signal_api_processes()

    def _hurry(self) -> None:
        """The second signal: what still runs ends now, each stream with an error event."""
        log.info("a second signal: running requests are ended")
        self._hurried = True
        self._stop_at = time.monotonic() + EXIT_GRACE_S
        self._signal_api_processes()

    def _signal_api_processes(self) -> None:
        for managed in self._processes:
            if managed.child is not None and not managed.is_core:
                managed.child.process.send_signal(DRAIN_SIGNAL)

    def _kill_all(self) -> None:
        """Leaves no orphan process; cores hold no state that a kill could lose."""
        children = [managed.child for managed in self._processes if managed.child is not None]
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()
            child.status.close()
        signal.set_wakeup_fd(-1)
        if self._part is not None:
            self._part.close()
        self._selector.close()
        self._signals_in.close()
        self._signals_out.close()
