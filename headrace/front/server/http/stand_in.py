"""A stand-in for an event loop that is late: a thread that answers probes, whatever the loop does.

The loop accepts connections itself. What it has left in the queue of the listening socket for
LATE_S this thread takes. A probe, known by what can be read of a connection without taking it
(MSG_PEEK), is answered here and its connection ended; every other connection is handed over to the
loop with nothing read. If more than `max_waiting` wait for the loop, further ones are refused here:
the queue never fills up, and the next probe gets through. A loop in good health never meets it."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.base.errors import HeadraceError, Unavailable
from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.auth import ID_HEADERS, request_id
from headrace.front.server.http.failures import OPENAI, ErrorFormat, failure_of

LATE_S = 0.005
SILENT_S = 1.0
"""A connection that sends nothing for so long is the loop's, which has a clock for it."""
MAX_SILENT = 256
MAX_WAITING = 1024
PEEK_BYTES = 8192
MAX_PROBE_HEADERS = 32
"""A request with more is the loop's, which has the bounds and the errors of headers."""
DISCARD_BYTES = 1 << 16


class _ParsedHead:
    """What the parser of HTTP/1 (the loop's own) found in the bytes peeked at."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.urls: list[bytes] = []
        self.ended = 0

    def on_url(self, url: bytes) -> None:
        """A request, with its target (in one call: the bytes are all there)."""
        self.urls.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.append(name.lower())

    def on_message_complete(self) -> None:
        """The end of a request."""
        self.ended += 1


@dataclass(eq=False)
class _Silent:
    """A connection that has sent nothing yet."""

    connection: socket.socket
    until: float


class StandIn:
    """Stands in for the loop of `server`, in which `start` is called. `probes`: what answers
    `GET path`; called in this thread."""

    def __init__(
        self,
        listener: socket.socket,
        probes: Mapping[bytes, Callable[[], Response]],
        server: uvicorn.Server,
        metrics: Metrics,
        *,
        errors: ErrorFormat = OPENAI,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._listener = listener.dup()
        self._listener.setblocking(False)
        self._probes, self._server, self._metrics = probes, server, metrics
        self._errors, self._max_waiting = errors, max_waiting
        self._handed = self._taken = 0  # each is written by one thread
        self._taking: set[asyncio.Task[object]] = set()
        self._silent: list[_Silent] = []
        self._selector = selectors.DefaultSelector()
        self._ended, self._end = socket.socketpair()
        self._look_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)

    def start(self) -> None:
        """Begins to watch the listening socket."""
        self._loop = asyncio.get_running_loop()
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; connections that have sent nothing end with it."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        while self._turn():
            pass
        for silent in self._silent:
            silent.connection.close()
        self._selector.close()
        self._listener.close()
        self._ended.close()

    def _turn(self) -> bool:
        """Waits for the next thing to do, and does it; whether to go on."""
        ready = {key.fileobj: key.data for key, _ in self._selector.select(self._wait_s())}
        if self._ended in ready:
            return False
        now = time.monotonic()
        if self._listener in ready:  # the loop has its chance first
            self._selector.unregister(self._listener)
            self._look_at = now + LATE_S
        for silent in [one for one in self._silent if one.connection in ready or now >= one.until]:
            self._answer_or_hand_over(silent)
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            self._accept(now)
            self._selector.register(self._listener, selectors.EVENT_READ)
        return True

    def _wait_s(self) -> float | None:
        times = [silent.until for silent in self._silent]
        if self._look_at is not None:
            times.append(self._look_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self, now: float) -> None:
        """Takes what the loop has left."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none is left, it is gone again, or no file may be opened
                return
            connection.setblocking(False)
            if len(self._silent) == MAX_SILENT:
                self._answer_or_hand_over(self._silent[0])
            self._silent.append(_Silent(connection, now + SILENT_S))
            self._selector.register(connection, selectors.EVENT_READ)

    def _answer_or_hand_over(self, silent: _Silent) -> None:
        """A connection has sent something, or waits no longer for it: answers it or hands it
        over."""
        connection = silent.connection
        self._silent.remove(silent)
        self._selector.unregister(connection)
        try:
            head = connection.recv(PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            head = None
        except OSError:
            connection.close()
            return
        probe = None if head is None else self._probe_of(head)
        if probe is not None:
            self._reply(connection, _bytes_of(probe()))
        elif self._handed - self._taken < self._max_waiting:
            self._handed += 1
            self._loop.call_soon_threadsafe(self._take, connection)
        else:
            self._metrics.add("headrace_rejections_total", reason="connections")
            error = Unavailable("the server does not keep up with its connections", retry_after_s=2)
            self._reply(connection, refusal(error, self._errors))

    def _take(self, connection: socket.socket) -> None:
        """Serves what was handed over, in the loop."""
        self._taken += 1
        work = self._loop.connect_accepted_socket(self._make_protocol, connection)
        task: asyncio.Task[object] = self._loop.create_task(work)
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    def _make_protocol(self) -> asyncio.Protocol:
        config = self._server.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        return make(config=config, server_state=self._server.server_state, app_state={})

    def _probe_of(self, head: bytes) -> Callable[[], Response] | None:
        """What answers this request, if it is a whole one, a probe, and nothing else. Whatever the
        loop could refuse, or would wait for, is the loop's: who answers depends on the moment, and
        the answer must not."""
        parsed = _ParsedHead()
        parser = httptools.HttpRequestParser(parsed)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        if parsed.ended != 1 or len(parsed.urls) != 1 or not head.endswith(b"\r\n\r\n"):
            return None
        if parser.get_method() != b"GET" or parser.get_http_version() != "1.1":
            return None
        if len(parsed.headers) > MAX_PROBE_HEADERS or parsed.headers.count(b"host") != 1:
            return None
        return self._probes.get(parsed.urls[0])

    def _reply(self, connection: socket.socket, answer: bytes) -> None:
        """Answers and ends the connection. What it has sent is read, or the answer would be lost in
        a reset."""
        with contextlib.suppress(OSError):
            connection.recv(DISCARD_BYTES)
            connection.send(answer)
            connection.shutdown(socket.SHUT_WR)
        connection.close()


def refusal(error: HeadraceError, errors: ErrorFormat) -> bytes:
    """The answer to what is refused before there is a request; the connection ends with it."""
    ident = request_id()
    failure = failure_of(error, request_id=ident)
    headers = [(b"content-type", b"application/json"), *failure.headers()]
    return _message(failure.status, headers, errors.body(failure, ident), ident)


def _bytes_of(response: Response) -> bytes:
    headers = [pair for pair in response.raw_headers if pair[0] != b"content-length"]
    return _message(response.status_code, headers, bytes(response.body), request_id())


def _message(status: int, headers: list[tuple[bytes, bytes]], body: bytes, ident: str) -> bytes:
    lines = [STATUS_LINE[status], b"connection: close\r\n"]
    lines += [name + b": " + ident.encode() + b"\r\n" for name in ID_HEADERS]
    lines += [name + b": " + value + b"\r\n" for name, value in headers]
    lines += [b"content-length: %d\r\n\r\n" % len(body), body]
    return b"".join(lines)
