"""Bounds on waiting times that other load on the machine cannot break.

The kernel says how long some task has waited for a processor (/proc/pressure/cpu). A stopwatch leaves
that time out: on a quiet machine it shows wall time and a bound is held strictly, on a machine that is
busy with other work it shows less, down to nothing, and the bound says nothing. Beside other tests it
shows nothing at all, so that no outcome there is chance. `make slow` runs the tests marked `serial`
one at a time, where the bounds hold; so does pytest without workers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
# Set by xdist in its workers and by conftest.py.
BESIDE_OTHERS = not {"PYTEST_XDIST_WORKER", "TESTS_BESIDE_OTHERS"}.isdisjoint(os.environ)


def stalled_s() -> float:
    """Seconds since the machine's start in which some task waited; 0 where the kernel does not say."""
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


class _Standstills:
    """Counts the seconds in which this process did not run at all though it wanted to, as when the
    whole machine is paused: those of ticks that came more than GAP_S late."""

    TICK_S = 0.05
    GAP_S = 0.5

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last_s, self._last_stalled_s = time.monotonic(), stalled_s()
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(self.TICK_S)
            self.look()

    def look(self) -> None:
        """What has passed since the last look, without what `stalled_s` counts already."""
        now_s, now_stalled_s = time.monotonic(), stalled_s()
        late_s = now_s - self._last_s - self.TICK_S - (now_stalled_s - self._last_stalled_s)
        if late_s > self.GAP_S:
            self.seconds += late_s
        self._last_s, self._last_stalled_s = now_s, now_stalled_s


_standstills = None if BESIDE_OTHERS else _Standstills()


def _all_lost_s() -> float:
    return time.monotonic() if _standstills is None else stalled_s() + _standstills.seconds


class Stopwatch:
    """Runs from its making on, by `clock`; `lost_s` tells the seconds that do not count."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        lost_s: Callable[[], float] = _all_lost_s,
    ) -> None:
        self._clock, self._all_lost_s = clock, lost_s
        self._began_s = clock()
        self._lost_s = lost_s()

    @property
    def wall_s(self) -> float:
        """Seconds since, as a clock on the wall shows them: for least times."""
        return self._clock() - self._began_s

    @property
    def undisturbed_s(self) -> float:
        """Seconds since, without those in which some task waited for a processor or everything stood
        still: for most times."""
        return max(self.wall_s - (self._all_lost_s() - self._lost_s), 0.0)
