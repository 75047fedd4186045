"""Threads for work on texts, so that the event loop goes on meanwhile: tokenizing, rendering,
decoding, parsing.

What may run is bounded in number, what may wait in characters. Long texts have threads of their
own, so that short ones never wait behind them; among those that wait, the shorter one goes first
as long as the longer one has not waited for much longer. Work whose client has left is not begun;
work in progress ends at its next `checkpoint`. Where a library fails over a text, the text is
refused (`refusing_failures`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.base.errors import InvalidRequest, Unavailable

T = TypeVar("T")
INLINE_CHARS = 8192
"""Work on so few characters takes less than a change of threads would cost the others."""
SHORT_CHARS = 64 * 1024
MAX_WAITING_CHARS = 64 << 20
SHORT_THREADS = 4
MAX_LONG_THREADS = 8
HEAD_START_S_PER_CHAR = 1e-5
"""So much later, by its length, a text counts as come: ten times what tokenizing it takes."""


class WorkStopped(Exception):
    """Nobody waits for this work any more."""


@dataclass(order=True)
class _Job:
    due: float
    number: int
    size: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False, default_factory=Future)
    waits: bool = field(compare=False, default=True)
    stopped: bool = field(compare=False, default=False)


_own = threading.local()


def checkpoint() -> None:
    """Called now and then by long work: raises WorkStopped once its client has left."""
    job: _Job | None = getattr(_own, "job", None)
    if job is not None and job.stopped:
        raise WorkStopped


class _Lane:
    """Some threads and what waits for them. Started as they are needed; they never end."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._name = name
        self._left = num_threads
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._chars = 0

    def add(self, size: int, work: Callable[[], Any]) -> _Job:
        """Takes work in, or refuses it where too much waits."""
        with self._lock:
            if self._chars and self._chars + size > MAX_WAITING_CHARS:
                raise Unavailable(
                    f"{self._chars} characters wait to be tokenized, and {size} more would be "
                    f"beyond {MAX_WAITING_CHARS}",
                    retry_after_s=1.0,
                )
            self._chars += size
            begins = self._left > 0
            self._left -= begins
        due = time.monotonic() + size * HEAD_START_S_PER_CHAR
        job = _Job(due, next(self._numbers), size, work)
        self._jobs.put(job)
        if begins:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return job

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            self._taken(job)
            if job.result.set_running_or_notify_cancel():
                self._do(job)

    def _taken(self, job: _Job) -> bool:
        """The job waits no longer; whether it did."""
        with self._lock:
            waited = job.waits
            job.waits = False
            if waited:
                self._chars -= job.size
        return waited

    def leave(self, job: _Job) -> None:
        """Its client waits no longer. What was not begun holds nothing from now on."""
        job.stopped = True
        if self._taken(job):
            job.work = _nothing

    def _do(self, job: _Job) -> None:
        _own.job = job
        try:
            result = job.work()
        except BaseException as error:  # it is its waiter's, whatever it is
            job.result.set_exception(error)
        else:
            job.result.set_result(result)
        finally:
            _own.job = None


def _nothing() -> None:
    pass


class TextThreads:
    """See the module. `long_threads`: by default half of the CPUs."""

    def __init__(self, long_threads: int | None = None) -> None:
        half = len(os.sched_getaffinity(0)) // 2
        self._short = _Lane(SHORT_THREADS, "text-short")
        self._long = _Lane(long_threads or min(max(half, 1), MAX_LONG_THREADS), "text-long")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of work on `size` characters: at once if they are few, else in a thread. What
        is asked for in such a thread is done there."""
        if size < INLINE_CHARS or getattr(_own, "job", None) is not None:
            return work()
        lane = self._short if size <= SHORT_CHARS else self._long
        job = lane.add(size, work)
        try:
            result: T = await asyncio.wrap_future(job.result)
            return result
        finally:
            lane.leave(job)


TEXT_THREADS = TextThreads()
"""Those of this process."""


@contextlib.contextmanager
def refusing_failures(text: str, *, field: str = "prompt") -> Iterator[None]:
    """What a tokenizer's library raises over a text is about this text: a refusal. A panic of a
    library in Rust is no Exception, and would pass by whoever handles errors."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise InvalidRequest(
            f"{field}: the tokenizer gave up on this text of {len(text)} characters; "
            "send a shorter or a plainer one",
            field=field,
        ) from error
