"""The memory that processes hold, as Linux counts it; nothing is known elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def resident_bytes(pid: int | None = None) -> int:
    """Of one process (None: this one); 0 where it is gone or cannot be asked."""
    try:
        pages = (PROC / str(pid or os.getpid()) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int | None = None) -> list[int]:
    """The processes below one (None: this one)."""
    below: list[int] = []
    todo = [pid or os.getpid()]
    while todo:
        for children in (PROC / str(todo.pop()) / "task").glob("*/children"):
            try:
                pids = [int(word) for word in children.read_text().split()]
            except OSError:
                continue
            below += pids
            todo += pids
    return below
