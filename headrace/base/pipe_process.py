"""A child process for bounded work: it answers over two pipes and is killed if it is late."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import weakref

from headrace.base import env


class PipeProcess:
    """A child process with a pipe each way; one request at a time.

    Its environment has no API keys, its stderr is discarded (a crash would fill the log), and it
    ends with its parent, when its input pipe ends.
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

    def exit_signal(self) -> int | None:
        """The number of the signal that ended the process; None if it ended by itself. Waits for
        the end, which must be near: its output has closed."""
        status = self._process.wait()
        return -status if status < 0 else None

    def write(self, frame: bytes) -> None:
        """Sends all of it; OSError if the process is gone."""
        self._input.write(frame)
        self._input.flush()

    def read(self, size: int, deadline: float) -> bytes:
        """Exactly so many bytes. TimeoutError at `deadline` of the monotonic clock, EOFError if the
        process ended."""
        data = bytearray()
        poller = select.poll()  # unlike select(), not bounded to 1024 descriptors
        poller.register(self.output, select.POLLIN)
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError
            piece = os.read(self.output, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
