"""The process in which a grammar is compiled first: with bounded memory, under an alarm, and killed when it is late.

Only what was compiled here within the bounds is compiled in the core (P12). Messages are msgpack behind a length, over
two pipes. The process ends with its parent: reading the pipe then ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from typing import BinaryIO

import msgspec
import numpy as np

from headrace.base import env
from headrace.base.errors import EngineError, HeadraceError, InvalidRequest
from headrace.base.wire.codec import HEADER, Codec
from headrace.base.wire.grammar import Node, Vocabulary
from headrace.core.grammar.backends import make_backend

START_S = 60.0


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: which backend, for which vocabulary, and how much memory beyond it."""

    backend: str
    vocabulary: Vocabulary
    memory_bytes: int


class Try(msgspec.Struct, frozen=True, tag="try"):
    """Compile this; the alarm rings after `limit_s`."""

    node: Node
    limit_s: float


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What came of it: the error, or how many bytes the process has grown by."""

    error: str | None = None
    grown_bytes: int = 0


_TO_TRIAL: Codec[Begin | Try] = Codec(Begin | Try)
_FROM_TRIAL: Codec[Verdict] = Codec(Verdict)


class Trial:
    """The process, from the side of the core. One request at a time; not shared between threads."""

    def __init__(self, begin: Begin) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.core.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a grammar that kills it would fill the log
            start_new_session=True,
            env=env.child_environment(HEADRACE_API_KEYS="", HEADRACE_ADMIN_KEY=""),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._send(begin)
            self._receive(time.monotonic() + START_S)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise EngineError("the process that tries grammars does not start") from None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def compile(self, node: Node, limit_s: float) -> int:
        """Compiles there; the bytes it took. InvalidRequest if it cannot be done, or not within the bounds."""
        try:
            self._send(Try(node, limit_s + 1))
            verdict = self._receive(time.monotonic() + limit_s)
        except TimeoutError:
            self.close()
            raise InvalidRequest(f"it takes longer than {limit_s:g} s to compile") from None
        except (EOFError, OSError):
            self.close()
            raise InvalidRequest("it needs too much memory to compile") from None
        if verdict.error is not None:
            raise InvalidRequest(verdict.error)
        return verdict.grown_bytes

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def _send(self, message: Begin | Try) -> None:
        self._input.write(_TO_TRIAL.frame(message))
        self._input.flush()

    def _receive(self, deadline: float) -> Verdict:
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return _FROM_TRIAL.decode(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        found = bytearray()
        poller = select.poll()
        poller.register(self._output.fileno(), select.POLLIN)
        while len(found) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError
            piece = os.read(self._output.fileno(), size - len(found))
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


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Compiles until the other end closes."""
    begin = _next(source)
    assert isinstance(begin, Begin), begin
    backend = make_backend(begin.backend, begin.vocabulary)
    masks = np.zeros((1, -(-begin.vocabulary.width // 32)), np.int32)
    most = _bytes("VmSize") + begin.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer(sink, Verdict())
    while (request := _next(source)) is not None:
        assert isinstance(request, Try), request
        signal.setitimer(signal.ITIMER_REAL, request.limit_s)
        before = _bytes("VmRSS")
        try:
            error = backend.fill([backend.compile(request.node)], masks)[0]
        except HeadraceError as refused:
            error = refused.message
        except Exception as failed:
            error = f"it cannot be compiled ({type(failed).__name__})"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(sink, Verdict(error, max(0, _bytes("VmRSS") - before)))


def _next(source: BinaryIO) -> Begin | Try | None:
    head = source.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    return _TO_TRIAL.decode(source.read(HEADER.unpack(head)[0]))


def _answer(sink: BinaryIO, verdict: Verdict) -> None:
    sink.write(_FROM_TRIAL.frame(verdict))
    sink.flush()


def _bytes(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
