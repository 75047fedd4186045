"""The watchdog of a core process: heartbeats to the supervisor, word to the frontends about a step
that is suspiciously slow, and the end of a process whose step has hung."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from headrace.launch.topology import Report, report

log = logging.getLogger(__name__)
HUNG_EXIT = 70


class Watchdog:
    """Watches the steps of one core from a thread of its own.

    Heartbeats come from this thread: they say that the process runs, however long a step takes.
    `on_slow` is called once for a step that has taken `slow_after_s()` and is not done, with its
    seconds, and again with None when it is done; after `timeout_s` the process ends. `since` is
    when the step that runs began (time.monotonic), None between steps: the loop sets it, which
    costs it nothing.
    """

    def __init__(
        self,
        timeout_s: float,
        status: socket.socket,
        *,
        slow_after_s: Callable[[], float],
        on_slow: Callable[[float | None], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._status = status
        self._slow_after_s = slow_after_s
        self._on_slow = on_slow
        self.since: float | None = None
        self._slow_since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def report(self, message: Report) -> None:
        """Sends a report to the parent."""
        report(self._status, message)

    def look(self, now: float) -> None:
        """Compares the step that runs with its bounds."""
        since = self.since
        if self._slow_since is not None and since != self._slow_since:
            self._slow_since = None
            self._on_slow(None)
        if since is None:
            return
        seconds = now - since
        if self._slow_since is None and seconds > self._slow_after_s():
            self._slow_since = since
            log.warning("a step has taken %.0f s and is not done", seconds)
            self._on_slow(seconds)
        if seconds > self._timeout_s:
            log.error("a step has taken more than %g s: the engine is hung", self._timeout_s)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(HUNG_EXIT)

    def _watch(self) -> None:
        pause_s = min(1.0, max(0.01, self._timeout_s / 4))
        while True:
            time.sleep(pause_s)
            report(self._status, Report(heartbeat=True))
            self.look(time.monotonic())
