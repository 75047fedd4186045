"""Whether a child process was stopped by a signal (SIGSTOP) and stays so."""

from __future__ import annotations

from pathlib import Path

CHECK_S = 0.25
"""Pause between two looks at a process. One that is stopped for so long is taken for stopped for
good: whoever waits for it is told within a second."""


def stop_of(pid: int) -> int | None:
    """Which stop by a signal a process is in, by how often it was taken off its CPU before (state T
    and the context switches of proc_pid_status(5)); None: it is in none. Two looks that see the
    same number see one stop. A process under a debugger is in state t and left alone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    status = dict(line.partition(":")[::2] for line in lines)
    switches = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    return switches if status["State"].split()[0] == "T" else None


class StopDetector:
    """Looks at one process from time to time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop: int | None = None
        self._since = 0.0

    def is_stopped(self, now: float) -> bool:
        """Whether it is in the stop that a look at least CHECK_S ago saw; `now`: seconds of a
        monotonic clock."""
        stop = stop_of(self._pid)
        if stop is None or stop != self._stop:
            self._stop, self._since = stop, now
            return False
        return now - self._since >= CHECK_S
