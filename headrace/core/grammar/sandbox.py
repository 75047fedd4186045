"""The process in which a grammar is compiled first: with bounded memory, under an alarm, and killed
when it is late.

Only what was compiled here within the bounds is compiled in the core. Messages are msgpack
behind a length, over two pipes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from typing import BinaryIO

import msgspec
import numpy as np

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest, Unavailable
from headrace.base.pipe_process import START_S, PipeProcess
from headrace.base.wire.codec import HEADER, Codec
from headrace.base.wire.grammar import Node, Vocabulary
from headrace.core.grammar.backends import make_backend

NICENESS = 5
"""Whoever streams goes first: as many sandboxes as there are processors, busy with hostile
grammars, took turns with the engine."""
PATIENCE = 12
"""Seconds waited for each second of processor time that a grammar may take: beside others it is
slower, and that is not its fault."""


class SandboxStart(msgspec.Struct, frozen=True, tag="begin"):
    """The first message: which backend, for which vocabulary, and how much memory beyond it."""

    backend: str
    vocabulary: Vocabulary
    memory_bytes: int


class CompileJob(msgspec.Struct, frozen=True, tag="try"):
    """Compile this, in at most `limit_s` seconds of processor time."""

    node: Node
    limit_s: float


class CompileOutcome(msgspec.Struct, frozen=True, tag="verdict"):
    """What came of it: the error, or how many bytes the process has grown by, and how many tokens
    must come first (MAX_FORCED: or more)."""

    error: str | None = None
    grown_bytes: int = 0
    num_forced: int = 0


_TO_SANDBOX: Codec[SandboxStart | CompileJob] = Codec(SandboxStart | CompileJob)
_FROM_SANDBOX: Codec[CompileOutcome] = Codec(CompileOutcome)


class CompileSandbox:
    """The process, from the side of the core. One request at a time; but for `kill` not shared
    between threads."""

    def __init__(self) -> None:
        self._child = PipeProcess("-m", "headrace.core.grammar.sandbox")
        self._child.close.atexit = False  # its compiler ends it, after the thread that waits for it
        self.kill = self._child.kill

    def start(self, begin: SandboxStart) -> None:
        """Comes before all else. EngineError if it does not."""
        try:
            self._send(begin)
            (size,) = HEADER.unpack(self._child.read_first(HEADER.size))
            self._child.read(size, time.monotonic() + START_S)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise EngineError("the process that tries grammars does not start") from None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._child.alive

    def compile(self, node: Node, limit_s: float) -> CompileOutcome:
        """Compiles there; what it took. InvalidRequest if the grammar is at fault: it cannot
        be compiled, or needs more memory, or more than `limit_s` of processor time. Unavailable if
        the machine is: the process was killed by somebody else, or got too little of the
        processor."""
        try:
            self._send(CompileJob(node, limit_s))
            outcome = self._receive(time.monotonic() + PATIENCE * limit_s)
        except TimeoutError:
            self.close()
            raise Unavailable(
                f"the machine is too busy: not compiled within {PATIENCE * limit_s:g} s",
                retry_after_s=limit_s,
            ) from None
        except (EOFError, OSError):
            raise self._end(limit_s) from None
        if outcome.error is not None:
            raise InvalidRequest(outcome.error)
        return outcome

    def _end(self, limit_s: float) -> HeadraceError:
        """Why the process has ended."""
        ended_by = self._child.exit_signal()
        self.close()
        if ended_by == signal.SIGPROF:
            return InvalidRequest(f"it takes longer than {limit_s:g} s to compile")
        if ended_by in (None, signal.SIGABRT, signal.SIGSEGV):
            return InvalidRequest("it needs too much memory to compile")
        return Unavailable("the process that compiles it was killed", retry_after_s=1.0)

    def close(self) -> None:
        """Ends the process."""
        self._child.close()

    def _send(self, message: SandboxStart | CompileJob) -> None:
        self._child.write(_TO_SANDBOX.frame(message))

    def _receive(self, deadline: float) -> CompileOutcome:
        (size,) = HEADER.unpack(self._child.read(HEADER.size, deadline))
        return _FROM_SANDBOX.decode(self._child.read(size, deadline))


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Compiles until the other end closes."""
    begin = _next(source)
    assert isinstance(begin, SandboxStart), begin
    backend = make_backend(begin.backend, begin.vocabulary)
    masks = np.zeros((1, -(-begin.vocabulary.width // 32)), np.int32)
    most = _bytes("VmSize") + begin.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer(sink, CompileOutcome())
    os.nice(NICENESS)  # behind the imports, for which requests wait
    while (request := _next(source)) is not None:
        assert isinstance(request, CompileJob), request
        signal.setitimer(signal.ITIMER_PROF, request.limit_s)
        before, num_forced = _bytes("VmRSS"), 0
        try:
            matcher = backend.compile(request.node)
            num_forced = len(matcher.forced())
            error = backend.fill([matcher], masks)[0]
        except HeadraceError as refused:
            error = refused.message
        except Exception as failed:
            error = f"it cannot be compiled ({type(failed).__name__})"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(sink, CompileOutcome(error, max(0, _bytes("VmRSS") - before), num_forced))


def _next(source: BinaryIO) -> SandboxStart | CompileJob | None:
    head = source.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    return _TO_SANDBOX.decode(source.read(HEADER.unpack(head)[0]))


def _answer(sink: BinaryIO, verdict: CompileOutcome) -> None:
    sink.write(_FROM_SANDBOX.frame(verdict))
    sink.flush()


def _bytes(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
