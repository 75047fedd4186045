"""Processes that render chat templates, from the side of those who wait for them.

Each render has a deadline; a process that misses it is killed and replaced, and the request that
asked for it fails. `TemplatePool` is for threads. `LoopRenderer` is for the event loop: a thread
per render costs more than the render, and every hand-over of the interpreter is taken from the
streams. So the loop keeps one process and sends it short renders one behind the other; the answers
come in order. A render that keeps those behind it waiting for PATIENCE_S goes on alone: they, and
all that come meanwhile, take the pool's way (threads, other processes). Its own deadline is that of
every render.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest, Unavailable
from headrace.base.pipe_process import START_S, PipeProcess

PATIENCE_S = 0.5
PIPE_BYTES = 60_000
"""What an empty pipe takes at once, so that a write of it cannot block."""
_READ_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")
_SCRIPT = Path(__file__).with_name("template_worker.py")
_MAX_SOURCES = 32
_Answer = asyncio.Future[dict[str, Any] | None]


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one render: wall clock, size of its output, and memory of the process that does
    it."""

    seconds: float = 5.0
    max_chars: int = 32_000_000
    memory_bytes: int = 1 << 30


class TemplatePool:
    """At most `size` processes, started when they are first needed. Safe to use from several
    threads."""

    def __init__(self, limits: TemplateLimits, *, size: int = 3) -> None:
        self.limits = limits
        self._slots: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def names(self, source: str) -> list[str]:
        """The variables a template reads; one that cannot be compiled is refused. Asked of the
        server's own template, at its start: for as long as a process may take to start."""
        names: list[str] = _checked(self._ask(source, None))["names"]
        return names

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The rendered template; InvalidRequest if it fails or exceeds a limit."""
        return self.text_of(self._ask(source, variables))

    def text_of(self, reply: dict[str, Any]) -> str:
        """The rendered template of a reply; InvalidRequest if it says what went wrong."""
        return str(_checked(reply)["text"])

    def borrow(self) -> Worker | None:
        """An idle process that runs, if there is one; the caller gives it back."""
        try:
            worker = self._slots.get_nowait()
        except queue.Empty:
            return None
        if worker is None or not worker.alive:
            self._slots.put(worker)
            return None
        return worker

    def give(self, worker: Worker | None) -> None:
        """Gives back what was borrowed, None for a process that was ended."""
        self._slots.put(worker)

    def close(self) -> None:
        """Ends idle processes; the pool may be used again."""
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for worker in idle:
            if worker is not None:
                worker.close()
            self._slots.put(None)

    def _ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
        limits = self.limits
        try:
            worker = self._slots.get(timeout=limits.seconds)
        except queue.Empty:
            raise Unavailable("all chat template processes are busy", retry_after_s=1.0) from None
        try:
            if worker is None or not worker.alive:
                worker = Worker(limits)
            limit_s = START_S if variables is None else limits.seconds
            return worker.ask(source, worker.frame(source, variables), limit_s)
        except BaseException:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            self._slots.put(worker)


class Worker:
    """One process. Its two pipes carry the requests one after the other."""

    def __init__(self, limits: TemplateLimits) -> None:
        bounds = [str(each) for each in (limits.memory_bytes, limits.max_chars, limits.seconds + 1)]
        self._child = PipeProcess("-P", "-X", "utf8", str(_SCRIPT), *bounds)
        self._sources: dict[str, int] = {}
        if self._child.read_first(1) != b"!":
            self.close()
            raise EngineError("the chat template process does not start")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.alive

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds the process up: no request is at fault then."""
        return self._child.is_stopped

    def frame(self, source: str, variables: dict[str, Any] | None) -> bytes:
        """One request: length and JSON. A template goes along until it was sent once. Without
        variables it asks for the names of those there are."""
        new = len(self._sources) % _MAX_SOURCES
        request: dict[str, Any] = {"variables": variables, "number": self._sources.get(source, new)}
        if source not in self._sources:
            request["source"] = source
        if variables is None:
            request["limit_s"] = START_S + 1
        body = json.dumps(request).encode()
        return _LENGTH.pack(len(body)) + body

    @property
    def output(self) -> int:
        """The descriptor that replies come from."""
        return self._child.output

    def ask(self, source: str, frame: bytes, limit_s: float) -> dict[str, Any]:
        """Sends one request; a process that is too slow or dies over it costs the request
        InvalidRequest."""
        deadline = time.monotonic() + limit_s
        if len(frame) < PIPE_BYTES:
            self.write(frame, source)
        else:
            threading.Thread(target=self.write, args=(frame, source)).start()
        try:
            size = _LENGTH.unpack(self._child.read(_LENGTH.size, deadline))[0]
            reply: dict[str, Any] = json.loads(self._child.read(size, deadline))
        except TimeoutError:
            if self.is_stopped:
                why = "the chat template process was stopped by a signal"
                raise Unavailable(why, retry_after_s=1.0) from None
            message = f"messages: the chat template takes longer than {limit_s:g} s"
            raise InvalidRequest(message, field="messages") from None
        except EOFError:
            raise self.why_ended() from None
        except BaseException:
            self.close()
            raise
        return reply

    def why_ended(self) -> HeadraceError:
        """What becomes of the request over which the process ended: killed from outside, for want
        of memory say, it was not the request's doing."""
        if self._child.exit_signal() == signal.SIGKILL:
            return Unavailable("the chat template process was killed", retry_after_s=1.0)
        return InvalidRequest(
            "messages: the chat template ended the process that rendered it", field="messages"
        )

    def write(self, frame: bytes, source: str) -> None:
        """Sends a request without waiting for its reply; the process knows its template from then
        on."""
        if source not in self._sources:
            if len(self._sources) == _MAX_SOURCES:
                self._sources.clear()  # their numbers are given anew
            self._sources[source] = len(self._sources)
        with contextlib.suppress(OSError):
            self._child.write(frame)

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


class LoopRenderer:
    """Serves the event loop that first asked. `_sent`: what is under way, with its size; an answer
    is None where it has to go another way. Invariant: while something is under way, a timer runs
    that looks whether replies come."""

    def __init__(self, pool: TemplatePool) -> None:
        self._pool = pool
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: deque[tuple[int, _Answer]] = deque()
        self._bytes = 0
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._replies = self._seen = 0
        self._late_at: int | None = None

    async def render(self, source: str, variables: dict[str, Any]) -> str:
        """See TemplatePool.render."""
        answer = self._send(source, variables)
        reply = None if answer is None else await answer
        if reply is None:
            return await asyncio.to_thread(self._pool.render, source, variables)
        return self._pool.text_of(reply)

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.close()
            self._pool.give(None)
            self._worker = None

    def _send(self, source: str, variables: dict[str, Any]) -> _Answer | None:
        """Sends a request, if there is a process for it with room in its pipe."""
        loop = asyncio.get_running_loop()
        worker = self._worker or self._join(loop)
        if worker is None or self._late_at == self._replies or self._loop is not loop:
            return None
        frame = worker.frame(source, variables)
        if self._bytes + len(frame) > PIPE_BYTES:
            return None
        worker.write(frame, source)
        answer: _Answer = loop.create_future()
        self._sent.append((len(frame), answer))
        self._bytes += len(frame)
        if self._timer is None:
            self._timer = loop.call_later(PATIENCE_S, self._check)
        return answer

    def _join(self, loop: asyncio.AbstractEventLoop) -> Worker | None:
        """Takes a process that runs already; starting one would hold up the loop."""
        self._worker = self._pool.borrow()
        if self._worker is not None:
            self._loop = loop
            loop.add_reader(self._worker.output, self._readable)
        return self._worker

    def _readable(self) -> None:
        assert self._worker is not None
        piece = os.read(self._worker.output, _READ_BYTES)
        if not piece:
            self._end(self._worker.why_ended())
        self._buffer += piece
        while (reply := _reply_in(self._buffer)) is not None:
            size, answer = self._sent.popleft()
            self._bytes -= size
            self._replies += 1
            if not answer.done():  # else the client left, or it went another way
                answer.set_result(reply)

    def _check(self) -> None:
        """No reply since the last look: the first one takes long, and nobody waits behind it; at
        last it is ended."""
        assert self._loop is not None
        self._timer, delay_s = None, PATIENCE_S
        limit_s = self._pool.limits.seconds
        if not self._sent:
            return
        if self._seen != self._replies:
            self._seen = self._replies
        elif self._worker is not None and self._worker.is_stopped:
            self._end(None)
            return
        elif self._late_at != self._replies:
            self._late_at, delay_s = self._replies, max(limit_s - PATIENCE_S, 0.0)
            for _, answer in list(self._sent)[1:]:
                _settle(answer, None)
        else:
            message = f"messages: the chat template takes longer than {limit_s:g} s"
            self._end(InvalidRequest(message, field="messages"))
            return
        self._timer = self._loop.call_later(delay_s, self._check)

    def _end(self, error: HeadraceError | None) -> None:
        """The process is lost: the first one fails with the error, if it was its doing; the others
        go another way."""
        assert self._worker is not None and self._loop is not None
        self._loop.remove_reader(self._worker.output)
        if self._timer is not None:
            self._timer.cancel()
        self.close()
        for i, (_, answer) in enumerate(self._sent):
            if i or error is None:
                _settle(answer, None)
            elif not answer.done():
                answer.set_exception(error)
        self._sent.clear()
        self._buffer.clear()
        self._replies += 1
        self._bytes, self._timer = 0, None


def _reply_in(buffer: bytearray) -> dict[str, Any] | None:
    """Takes the first whole reply off the front of `buffer`."""
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    reply: dict[str, Any] = json.loads(buffer[_LENGTH.size : end])
    del buffer[:end]
    return reply


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise InvalidRequest(f"messages: chat template: {reply['error']}", field="messages")
    return reply


def _settle(answer: _Answer, reply: dict[str, Any] | None) -> None:
    """Nobody may wait any more: the client left, or it went another way."""
    if not answer.done():
        answer.set_result(reply)


def text_size(value: Any) -> int:
    """The number of characters in all texts of a JSON value, without recursion."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return size
