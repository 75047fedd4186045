"""The process in which a grammar is compiled first: with bounded memory, under an alarm, and killed when it is late.

Only what was compiled here within the bounds is compiled in the core (P12). Messages are msgpack behind a length, over
two pipes.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from typing import BinaryIO

import msgspec
import numpy as np

from headrace.base.child import Child
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
        self._child = Child("-m", "headrace.core.grammar.trial")
        try:
            self._send(begin)
            self._receive(time.monotonic() + START_S)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise EngineError("the process that tries grammars does not start") from None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._child.alive

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
        self._child.close()

    def _send(self, message: Begin | Try) -> None:
        self._child.write(_TO_TRIAL.frame(message))

    def _receive(self, deadline: float) -> Verdict:
        (size,) = HEADER.unpack(self._child.read(HEADER.size, deadline))
        return _FROM_TRIAL.decode(self._child.read(size, deadline))


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
