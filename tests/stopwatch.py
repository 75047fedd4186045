"""Bounds on waiting times that other load on the machine cannot break.

The kernel says how long some task has waited for a processor (/proc/pressure/cpu). A stopwatch leaves
that time out: on a quiet machine it shows wall time and a bound is held strictly, on a machine that is
busy with other work it shows less, down to nothing, and the bound says nothing. `make slow` runs the
tests marked `serial` one at a time, where the bounds hold.
"""

from __future__ import annotations

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


def stalled_s() -> float:
    """Seconds since the machine's start in which some task waited; 0 where the kernel does not say."""
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._stalled_s = stalled_s()

    @property
    def wall_s(self) -> float:
        """Seconds since, as a clock on the wall shows them: for least times."""
        return time.monotonic() - self._began_s

    @property
    def undisturbed_s(self) -> float:
        """Seconds since, without those in which some task waited for a processor: for most times."""
        return max(self.wall_s - (stalled_s() - self._stalled_s), 0.0)
