"""Engine cores that come and go while a server runs, beside those that are always there.

Whoever wants another number sees to it first that those that are to go have nothing left to do:
they are told to end, and end with status 0. A core that cannot start leaves the reason in a file
beside its socket, where API processes that wait for it look.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable

from headrace.launch.api_process import failure_at
from headrace.launch.children import ManagedProcess, ProcessOwner
from headrace.launch.supervisor import Supervisor
from headrace.launch.topology import Report

log = logging.getLogger(__name__)
ENDING_S = 10.0
"""A core that was told to end and has not by then is killed."""


class ElasticCores:
    """Implements `supervisor.LoopPart` and `children.ProcessOwner`. Cores are numbered; `fixed` of
    them are the supervisor's own, `most` is how many there may be. `path_of`: a core's socket.
    `is_group`: where one dies that has started all end, and those that are fixed start again."""

    def __init__(
        self,
        make: Callable[[int, ProcessOwner], ManagedProcess],
        path_of: Callable[[int], str],
        *,
        fixed: int,
        most: int,
        is_group: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._path_of, self._clock = make, path_of, clock
        self._fixed, self._most, self._count = fixed, most, fixed
        self._is_group = is_group
        self._supervisor: Supervisor | None = None
        self._cores: dict[int, ManagedProcess] = {}
        self._ending: dict[int, float] = {}

    def begin(self, supervisor: Supervisor) -> None:
        """See LoopPart."""
        self._supervisor = supervisor

    def asked(self, message: Report) -> None:
        """See LoopPart: cores are started, or told to end."""
        self._count = min(max(message.replicas, self._fixed), self._most)
        log.info("engine cores: %d from now on", self._count)
        for index in range(self._fixed, self._count):
            if index not in self._cores:
                self._begin_core(index)
        for index in [one for one in self._cores if one >= self._count]:
            self._end_core(index)

    def turn(self) -> None:
        """See LoopPart: those that do not end by themselves are killed."""
        now = self._clock()
        for index in [one for one, due in self._ending.items() if now >= due]:
            child = self._cores[index].child
            if child is not None:
                log.error("%s does not end; it is killed", self._cores[index].name)
                child.process.kill()
            self._ending[index] = math.inf

    def due(self) -> float:
        """See LoopPart."""
        return min(self._ending.values(), default=math.inf)

    def close(self) -> None:
        """See LoopPart."""

    def on_ready(self, managed: ManagedProcess) -> None:
        """See ProcessOwner."""
        log.info("%s is ready", managed.name)

    def on_death(self, managed: ManagedProcess, status: int) -> None:
        """See ProcessOwner: one that was told to end is forgotten, one that served is started
        again, one that could not start is given up."""
        index = next(number for number, one in self._cores.items() if one is managed)
        was_ending, is_wanted = index in self._ending, index < self._count
        self._ending.pop(index, None)
        if was_ending:
            log.info("%s has ended (exit status %d)", managed.name, status)
            delay_s: float | None = 0.0
        else:
            log.error("%s died (exit status %d)", managed.name, status)
            delay_s = managed.restart_delay_s(self._clock()) if managed.ready else None
        if self._is_group and not was_ending:
            self._count, delay_s = self._fixed, None
            if managed.ready and managed.ends_with is None and self._supervisor is not None:
                self._supervisor.end_fellows(managed)
        if is_wanted and delay_s is not None:
            managed.restart_at = self._clock() + delay_s
            return
        del self._cores[index]
        if is_wanted:
            why = managed.error or f"its process ended (exit status {status})"
            failure_at(self._path_of(index)).write_text(why)

    def _begin_core(self, index: int) -> None:
        assert self._supervisor is not None
        failure_at(self._path_of(index)).unlink(missing_ok=True)
        self._cores[index] = self._make(index, self)
        self._supervisor.add(self._cores[index])

    def _end_core(self, index: int) -> None:
        """The end of the stream tells a core to end; one that waits to be started again is not."""
        managed = self._cores[index]
        managed.restart_at = None
        if managed.child is None:
            del self._cores[index]
            return
        self._ending[index] = self._clock() + ENDING_S
        managed.child.status.shutdown(socket.SHUT_WR)
