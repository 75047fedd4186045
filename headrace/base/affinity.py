"""Keeps a thread, and the threads it starts, to some CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence


def keep_to(cpus: Sequence[int]) -> None:
    """The calling thread runs on these CPUs only, and what it starts from now on. None given, or none of them left to
    this process, or a system that knows no affinity: nothing changes."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return
