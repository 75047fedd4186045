"""How long this process has been running, for reports about start-up time; how much of that
processes got a processor."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since this process was created, to a hundredth on Linux.

    Not derived from the wall clock: Linux states the boot time in whole seconds, so a creation time
    by that clock is off by up to one.
    """
    if sys.platform != "linux":
        import psutil

        return time.time() - psutil.Process().create_time()
    (made_at,) = _stat_s("self", 22)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - made_at


def processor_s(pid: int) -> float:
    """Seconds of processor time that a child of this process has used, to a hundredth; OSError
    if it is gone, which it is not before it was waited for."""
    if sys.platform != "linux":
        import psutil

        return sum(psutil.Process(pid).cpu_times()[:2])
    return sum(_stat_s(pid, 14, 15))


def _stat_s(pid: int | str, *fields: int) -> list[float]:
    """Times in /proc/PID/stat, by their numbers in proc_pid_stat(5), in seconds."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(after_name[field - 3]) / os.sysconf("SC_CLK_TCK") for field in fields]
