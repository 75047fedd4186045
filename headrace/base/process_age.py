"""How long this process has been running, for reports about start-up time."""

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
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    made_at = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - made_at
