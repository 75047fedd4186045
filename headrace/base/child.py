"""A child process that answers over two pipes and is killed when it is late: for work that must be bounded."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import weakref

from headrace.base import env


class Child:
    """The process, from the side of those who wait for it. One request at a time.

    It knows none of our keys, its stderr goes nowhere (what kills it would fill the log), and it ends with its parent:
    reading its pipe then ends.
    """

    def __init__(self, *arguments: str) -> None:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env.child_environment(HEADRACE_API_KEYS="", HEADRACE_ADMIN_KEY=""),
        )
        assert process.stdin is not None and process.stdout is not None
        self._process, self._input = process, process.stdin
        self.output = process.stdout.fileno()
        """The descriptor that replies come from."""
        self.close = weakref.finalize(self, _end, process)
        """Ends the process; once is enough."""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def write(self, frame: bytes) -> None:
        """Sends all of it; OSError if the process is gone."""
        self._input.write(frame)
        self._input.flush()

    def read(self, size: int, deadline: float) -> bytes:
        """Exactly so many bytes. TimeoutError at `deadline` of the monotonic clock, EOFError if the process ended."""
        found = bytearray()
        poller = select.poll()  # unlike select(), not bounded to 1024 descriptors
        poller.register(self.output, select.POLLIN)
        while len(found) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError
            piece = os.read(self.output, size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
