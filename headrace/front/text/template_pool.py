"""Processes that render chat templates, from the side of those who wait for them.

Each render has a deadline; a process that misses it is killed and replaced, and the request that
asked for it fails.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import EngineError, InvalidRequest, Unavailable
from headrace.base.pipe_process import PipeProcess

_LENGTH = struct.Struct("<I")
_SCRIPT = Path(__file__).with_name("template_worker.py")
_START_S = 60.0
_MAX_SOURCES = 32
PIPE_BYTES = 60_000
"""What an empty pipe takes at once, so that a write of it cannot block."""


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
        """The variables a template reads; one that cannot be compiled is refused."""
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
        for _ in range(self._slots.qsize()):
            with contextlib.suppress(queue.Empty):
                worker = self._slots.get_nowait()
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
            return worker.ask(source, worker.frame(source, variables), limits.seconds)
        except BaseException:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            self._slots.put(worker)


def reply_in(buffer: bytearray) -> dict[str, Any] | None:
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


class Worker:
    """One process. Its two pipes carry the requests one after the other."""

    def __init__(self, limits: TemplateLimits) -> None:
        bounds = [str(each) for each in (limits.memory_bytes, limits.max_chars, limits.seconds + 1)]
        self._child = PipeProcess("-P", "-X", "utf8", str(_SCRIPT), *bounds)
        self._sources: dict[str, int] = {}
        if self._child.read(1, time.monotonic() + _START_S) != b"!":
            self.close()
            raise EngineError("the chat template process does not start")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.alive

    def frame(self, source: str, variables: dict[str, Any] | None) -> bytes:
        """One request: length and JSON. A template goes along until it was sent once. Without
        variables it asks for the names of those there are."""
        new = len(self._sources) % _MAX_SOURCES
        request: dict[str, Any] = {"variables": variables, "number": self._sources.get(source, new)}
        if source not in self._sources:
            request["source"] = source
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
            message = f"messages: the chat template takes longer than {limit_s:g} s"
            raise InvalidRequest(message, field="messages") from None
        except EOFError:
            message = "messages: the chat template ended the process that rendered it"
            raise InvalidRequest(message, field="messages") from None
        except BaseException:
            self.close()
            raise
        return reply

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
