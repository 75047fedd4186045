"""Processes that render chat templates, from the side of those who wait for them.

Each render has a deadline; a process that misses it is killed and replaced, and the request that asked for it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.errors import EngineError, InvalidRequest, Unavailable

_LENGTH = struct.Struct("<I")
_SCRIPT = Path(__file__).with_name("template_worker.py")
_START_S = 60.0
_PIPE_BYTES = 32_768


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one render: wall clock, size of its output, and memory of the process that does it."""

    seconds: float = 5.0
    max_chars: int = 32_000_000
    memory_bytes: int = 1 << 30


class TemplatePool:
    """At most `size` processes, started when they are first needed. Safe to use from several threads."""

    def __init__(self, limits: TemplateLimits, *, size: int = 2) -> None:
        self._limits = limits
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def names(self, source: str) -> list[str]:
        """The variables a template reads; one that cannot be compiled is refused."""
        names: list[str] = self._ask(source, None)["names"]
        return names

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The rendered template; InvalidRequest if it fails or exceeds a limit."""
        text: str = self._ask(source, variables)["text"]
        return text

    def close(self) -> None:
        """Ends idle processes; the pool may be used again."""
        for _ in range(self._slots.qsize()):
            with contextlib.suppress(queue.Empty):
                worker = self._slots.get_nowait()
                if worker is not None:
                    worker.close()
                self._slots.put(None)

    def _ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
        limits = self._limits
        request = {"source": source, "variables": variables, "max_chars": limits.max_chars}
        try:
            worker = self._slots.get(timeout=limits.seconds)
        except queue.Empty:
            raise Unavailable("all chat template processes are busy", retry_after_s=1.0) from None
        try:
            if worker is None or not worker.alive:
                worker = _Worker(limits.memory_bytes)
            reply = worker.ask(request, limits.seconds)
        except BaseException:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            self._slots.put(worker)
        if "error" in reply:
            raise InvalidRequest(f"messages: chat template: {reply['error']}", field="messages")
        return reply


class _Worker:
    """One process. Its two pipes carry one request at a time."""

    def __init__(self, memory_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(_SCRIPT), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env.child_environment(HEADRACE_API_KEYS="", HEADRACE_ADMIN_KEY=""),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._end = weakref.finalize(self, _end, self._process)
        if self._read(1, time.monotonic() + _START_S) != b"!":
            self.close()
            raise EngineError("the chat template process does not start")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends one request; a process that is too slow or dies over it costs the request InvalidRequest."""
        body = json.dumps({**request, "limit_s": limit_s + 1}).encode()
        deadline = time.monotonic() + limit_s
        frame = _LENGTH.pack(len(body)) + body
        if len(frame) < _PIPE_BYTES:  # fits into the empty pipe: the write cannot block
            self._write(frame)
        else:
            threading.Thread(target=self._write, args=(frame,)).start()
        try:
            size = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
            reply: dict[str, Any] = json.loads(self._read(size, deadline))
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

    def _write(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):
            self._input.write(frame)
            self._input.flush()

    def _read(self, size: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not _readable(self._output.fileno(), left):
                raise TimeoutError
            piece = os.read(self._output.fileno(), size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _readable(descriptor: int, timeout_s: float) -> bool:
    poller = select.poll()  # unlike select(), not bounded to 1024 descriptors
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
