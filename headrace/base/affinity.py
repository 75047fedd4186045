"""CPU affinity of a thread and of the threads it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence


def set_affinity(cpus: Sequence[int]) -> None:
    """Binds the calling thread, and threads it starts later, to `cpus`. Without effect if `cpus` is
    empty, if this process may use none of them, or if the system has no affinity calls."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return
