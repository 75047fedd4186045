"""Keeps a thread, and the threads it starts, to some CPUs, and says how OpenMP's threads wait for work there."""

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


def openmp_environment(threads: int) -> dict[str, str]:
    """Where `threads` take every core, OpenMP's must not spin while they wait: one disturbed thread would hold up all
    (an 8 x 1024 x 3072 product took 12 ms instead of 0.4). It must be said before torch's libraries are loaded."""
    return {"OMP_WAIT_POLICY": "passive"} if threads >= len(os.sched_getaffinity(0)) else {}
