"""How long this process has been there, for what is told of its start."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since this process was made, to a hundredth on Linux.

    Not what is left of the wall clock: Linux tells when the machine started in whole seconds, so that a process's
    creation by that clock is off by up to one.
    """
    if sys.platform != "linux":
        import psutil

        return time.time() - psutil.Process().create_time()
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    made_at = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - made_at
