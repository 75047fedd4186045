"""Documents of many values are read in a process of their own first, from the side of the server.

One that is refused there costs the streams of this process nothing but its bytes; one that passes
is then read here, once. Ordinary bodies, long texts and images never meet that process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import msgspec

from headrace.base.errors import (
    EngineError,
    HeadraceError,
    InvalidRequest,
    Unavailable,
    WireError,
    from_wire,
)
from headrace.base.pipe_process import PipeProcess, ProcessPool
from headrace.base.wire.codec import HEADER
from headrace.front.server.http.body_worker import BODY_LENGTH, READY
from headrace.front.server.http.limits import has_marks, parse_json

MANY_MARKS = 32 * 1024
"""So many brackets, quotes, colons and commas are made into values within a millisecond or two."""
LIMIT_S = 10.0
PATIENCE = 3
"""Seconds waited for each of processor time that a body may take: beside others it is slower."""


class BodyChecks:
    """At most `size` processes, started when they are first needed. Safe to use from several
    threads."""

    def __init__(self, *, size: int | None = None, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        size = size or max(1, min(4, len(os.sched_getaffinity(0)) // 2))
        what = "processes that read large bodies"
        self._pool = ProcessPool(lambda: _BodyProcess(limit_s), size=size, what=what)
        self._decoding = threading.Lock()

    def read(self, body: bytes | bytearray) -> Any:
        """The document of a body; InvalidRequest says what is wrong with it, Unavailable that too
        many are being read."""
        if not has_marks(body, MANY_MARKS):
            return parse_json(body)
        with self._pool.borrowed(wait_s=self._limit_s) as process:
            process.check(body)
        with self._decoding:  # it holds the interpreter anyway
            return msgspec.json.decode(body)

    def close(self) -> None:
        """Ends idle processes; they are started again when needed."""
        self._pool.close()


class _BodyProcess:
    """One process: a body at a time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child = PipeProcess("-m", "headrace.front.server.http.body_worker", str(limit_s))
        self._child.widen()
        with contextlib.suppress(EOFError, TimeoutError):
            if self._child.read_first(1) == READY:
                return
        self.close()
        raise EngineError("the process that reads large bodies does not start")

    @property
    def alive(self) -> bool:
        return self._child.alive

    def check(self, body: bytes | bytearray) -> None:
        """Raises what is wrong with a body."""
        self._child.write_aside([BODY_LENGTH.pack(len(body)), body])
        deadline = time.monotonic() + PATIENCE * self._limit_s
        try:
            (size,) = HEADER.unpack(self._child.read(HEADER.size, deadline))
            answer = self._child.read(size, deadline)
        except TimeoutError:
            self.close()
            raise Unavailable(
                f"the machine is too busy: the body was not read within {PATIENCE * self._limit_s:g} s",
                retry_after_s=self._limit_s,
            ) from None
        except EOFError:
            error = self._why_ended()
            self.close()
            raise error from None
        refusal = msgspec.msgpack.decode(answer, type=WireError | None)
        if refusal is not None:
            raise from_wire(refusal)

    def _why_ended(self) -> HeadraceError:
        """Killed from outside, for want of memory say, it was not the body's doing."""
        number = self._child.exit_signal()
        if number == signal.SIGPROF:
            return InvalidRequest(f"the body takes longer than {self._limit_s:g} s to read")
        if number == signal.SIGKILL:
            return Unavailable("the process that reads large bodies was killed", retry_after_s=1.0)
        return InvalidRequest("reading the body ended the process that did it")

    def close(self) -> None:
        self._child.close()
