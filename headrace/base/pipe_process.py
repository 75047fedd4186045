"""Child processes for bounded work: they answer over two pipes and are killed if they are late."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from headrace.base import env
from headrace.base.errors import InvalidRequest, Unavailable
from headrace.base.process_age import processor_s
from headrace.base.process_stop import stop_of

START_S = 60.0
_SET_PIPE_SIZE = 1031
_PIPE_BYTES = 1 << 20
# The C library reserves 64 MiB of addresses for each thread, and libraries start as many threads
# as there are cores: with many, a child's limit of memory would be spent before its work.
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}


class PipeProcess:
    """A child process with a pipe each way; one request at a time.

    Its environment has no API keys, its stderr is discarded (a crash would fill the log), and it
    ends with its parent, when its input pipe ends.
    """

    def __init__(self, *arguments: str) -> None:
        process = subprocess.Popen(
            [*env.python_command(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env.child_environment(HEADRACE_API_KEYS="", HEADRACE_ADMIN_KEY="", **_ONE_HEAP),
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

    def kill(self) -> None:
        """Ends the process alone: its reader, in whatever thread, sees the end and closes."""
        self._process.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds the process up."""
        return stop_of(self._process.pid) is not None

    def exit_signal(self) -> int | None:
        """The number of the signal that ended the process; None if it ended by itself. Waits for
        the end, which must be near: its output has closed."""
        status = self._process.wait()
        return -status if status < 0 else None

    def widen(self) -> None:
        """Larger pipes, if the system has them: a matter of speed alone."""
        for end in (self._input.fileno(), self.output):
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, _SET_PIPE_SIZE, _PIPE_BYTES)

    def write(self, frame: bytes) -> None:
        """Sends all of it; OSError if the process is gone."""
        self._input.write(frame)
        self._input.flush()

    def write_aside(self, parts: Sequence[bytes | bytearray]) -> None:
        """Sends them in a thread, so that a process that does not read holds up nobody; that it is
        gone, the reader sees."""
        threading.Thread(target=self._write_all, args=(parts,), daemon=True).start()

    def _write_all(self, parts: Sequence[bytes | bytearray]) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed meanwhile
            for part in parts:
                self._input.write(part)
            self._input.flush()

    def read_first(self, size: int) -> bytearray:
        """Exactly so many bytes, the first reply: waits as long as the process starts, which takes
        long where many others run. TimeoutError if it does not by START_S of processor time, or
        got none within START_S; EOFError if it ended."""
        poller = select.poll()
        poller.register(self.output, select.POLLIN)
        before = -1.0
        while not poller.poll(START_S * 1000):
            used = processor_s(self._process.pid)
            if used == before or used > START_S:
                raise TimeoutError
            before = used
        return self.read(size, time.monotonic() + START_S)

    def read(self, size: int, deadline: float) -> bytearray:
        """Exactly so many bytes. TimeoutError at `deadline` of the monotonic clock, EOFError if the
        process ended."""
        data, done = bytearray(size), 0
        places = memoryview(data)
        poller = select.poll()  # unlike select(), not bounded to 1024 descriptors
        poller.register(self.output, select.POLLIN)
        while done < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError
            num_read = os.readv(self.output, [places[done:]])
            if not num_read:
                raise EOFError
            done += num_read
        return data


class PooledProcess(Protocol):
    """A process of a pool."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


P = TypeVar("P", bound=PooledProcess)


class ProcessPool(Generic[P]):
    """At most `size` processes, started when they are first needed. Safe to use from several
    threads."""

    def __init__(self, make: Callable[[], P], *, size: int, what: str) -> None:
        self._make, self._what = make, what
        self._slots: queue.LifoQueue[P | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        self.num_started = 0

    @property
    def num_idle(self) -> int:
        """How many can be borrowed at once."""
        return self._slots.qsize()

    @contextlib.contextmanager
    def borrowed(self, *, wait_s: float) -> Iterator[P]:
        """A process for the block, which it survives, and a request that is refused there; what
        else is raised ends it. Unavailable if all are busy for so long."""
        try:
            process = self._slots.get(timeout=wait_s)
        except queue.Empty:
            raise Unavailable(f"all {self._what} are busy", retry_after_s=1.0) from None
        try:
            if process is None or not process.alive:
                process = self._make()
                self.num_started += 1
            yield process
        except InvalidRequest:
            raise
        except BaseException:
            if process is not None:
                process.close()
            process = None
            raise
        finally:
            self._slots.put(process)

    def close(self) -> None:
        """Ends idle processes; they are started again when needed."""
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for process in idle:
            if process is not None:
                process.close()
            self._slots.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
