"""The HTTP/1.1 connection: uvicorn's httptools protocol with the limits that must hold before a
request exists.

Headers are bounded in number, in bytes and in time, connections in number; a request line or header
block that breaks a bound is answered in OpenAI's error shape and the connection is closed.
Everything after the headers is limits.py."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.base.errors import (
    HeadersTooLarge,
    HeadraceError,
    InvalidRequest,
    RequestError,
    Unavailable,
)
from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.failures import OPENAI, ErrorFormat
from headrace.front.server.http.sse import CONNECTION_KEY, STALL_S
from headrace.front.server.http.stand_in import refusal
from headrace.front.server.http.stream_guard import BETWEEN_STREAMS, StreamGuard
from headrace.front.server.http.stream_guard_worker import DESCRIPTOR, STREAMING

MAX_HEADERS = 64


MAX_HEAD_BYTES = 64 * 1024


LEAVE_S = 2.0
LAST_CHUNK = b"\r\n0\r\n\r\n"


class HeaderTimeout(RequestError):
    """The client did not finish its headers in time."""

    status = 408


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """`header_timeout_s` counts from the connection, or from the first byte of a later request on
    it."""

    max_connections: int
    header_timeout_s: float
    errors: ErrorFormat = OPENAI


def guarded_protocol(
    limits: ConnectionLimits, metrics: Metrics, guard: StreamGuard, *, is_tls: bool = False
) -> type[asyncio.Protocol]:
    """The protocol class uvicorn is given as `http`; a class, because uvicorn constructs it per
    connection. `is_tls`: nobody but this process can end its streams with an event."""

    class Guarded(GuardedProtocol):
        connection_limits = limits
        connection_metrics = metrics
        stream_guard = guard
        strangers = {}

    class GuardedTls(Guarded):
        def keep_stream(self, last_events: bytes) -> None:
            """With its process the connection is gone, and so are its keys."""

    return GuardedTls if is_tls else Guarded


class GuardedProtocol(HttpToolsProtocol):
    """`strangers`: the connections on which nobody has shown a key yet (without keys: asked
    anything), oldest first. They share half of the places; the one that has waited longest makes
    room for a new one.

    Invariant: while a header block is incomplete, `_head_timer` runs and `_head_bytes` counts what
    arrived of it. Once there is a `_refusal`, everything that arrives is discarded; it is written
    behind the answers that were under way."""

    connection_limits: ConnectionLimits
    connection_metrics: Metrics
    stream_guard: StreamGuard
    strangers: dict[GuardedProtocol, None]

    _head_timer: asyncio.TimerHandle | None = None
    _leave_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _header_bytes = 0
    _refusal: HeadraceError | None = None
    _is_upgraded = False

    def connection_made(  # type: ignore[override]  # uvicorn's signature
        self, transport: asyncio.Transport
    ) -> None:
        """Makes room for the connection, or refuses it; starts the clock of the first header
        block."""
        super().connection_made(transport)
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self.strangers[self] = None
        self._start_head()
        limit = self.connection_limits.max_connections
        if len(self.connections) > limit or len(self.strangers) > max(1, limit // 2):
            next(stranger for stranger in self.strangers if stranger._is_idle)._make_room()

    def _make_room(self) -> None:
        if self._refusal is not None:
            self.transport.abort()  # it has been told, and does not leave
            del self.strangers[self]
            return
        self.connection_metrics.add("headrace_rejections_total", reason="connections")
        self.refuse(Unavailable("too many open connections", retry_after_s=1.0))

    def keep_place(self) -> None:
        """A request on it has shown a key: it is no stranger any more."""
        self.strangers.pop(self, None)

    def abort(self) -> None:
        """Closes the connection without waiting for its reader."""
        self.transport.abort()

    def keep_stream(self, last_events: bytes) -> None:
        """Until the answer that has begun is whole: should this process die, the connection ends
        with these events."""
        self.stream_guard.states[self._descriptor] = STREAMING
        with suppress(OSError):  # the guard is gone, or is behind
            socket.send_fds(
                self.stream_guard.channel,
                [
                    DESCRIPTOR.pack(self._descriptor),
                    b"%x\r\n" % len(last_events),
                    last_events,
                    LAST_CHUNK,
                ],
                [self._descriptor],
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks. What the last request left goes too: its scope knows this connection, a
        circle that only the garbage collector would find."""
        self._end_head()
        if self.stream_guard.states[self._descriptor]:  # closing it here is not its end
            self.stream_guard.states[self._descriptor] = 0
            with socket.socket(fileno=os.dup(self._descriptor)) as own, suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        if self._leave_timer is not None:
            self._leave_timer.cancel()
        self.strangers.pop(self, None)
        super().connection_lost(exc)
        if self._is_idle:
            self.cycle = self.scope = None  # type: ignore[assignment]  # as at the beginning

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; what it holds of an unfinished header block is bounded by one read
        beyond the limit."""
        if self._is_over:
            return
        super().data_received(data)
        if self._is_over:
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(_head_too_large())
        elif self._is_idle and self.timeout_keep_alive_task is None:
            self._start_head()  # an empty line, which begins no request

    def eof_received(self) -> None:
        """The client sends no more. One whose request is whole is taken to have left: nothing tells
        it from one that still reads."""
        unfinished = not self._is_idle and self.cycle.more_body
        if unfinished or (self._head_timer is not None and self._head_bytes):
            self.refuse(InvalidRequest("the connection ended before the request did"))

    def on_message_begin(self) -> None:
        """A further request on a kept connection: its header block gets a clock of its own."""
        super().on_message_begin()
        self._header_bytes = 0
        self.scope[CONNECTION_KEY] = self  # type: ignore[literal-required]  # our key
        if self._head_timer is None and not self._is_over:
            self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts complete headers (trailers of a chunked body too)."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        if len(self.headers) > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self.refuse(_head_too_large())

    def on_headers_complete(self) -> None:
        """Starts the request, unless it is refused by its headers."""
        self._end_head()
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            self.refuse(InvalidRequest(f"HTTP {version} is not spoken here; use HTTP/1.1"))
        elif hosts > 1 or (version == "1.1" and not hosts):
            self.refuse(InvalidRequest(f"{hosts} Host headers given; HTTP/1.1 asks for one"))
        if not self._is_over:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Ignores the body of a refused request."""
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ignores the end of a refused request."""
        if not self._is_over:
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Ignores a refused one; else the connection is the WebSocket's, and none of our clocks
        runs for it."""
        if not self._is_over:
            self.strangers.pop(self, None)
            self._is_upgraded = True
            # A ping waits behind messages that nobody reads yet.
            self.config.ws_ping_timeout = STALL_S
            super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """A refusal that has waited for this answer follows it."""
        if self.stream_guard.states[self._descriptor]:
            self.stream_guard.states[self._descriptor] = BETWEEN_STREAMS
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refusal is not None:
            self._unset_keepalive_if_required()
            self._write_refusal(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses (bad syntax, Content-Length beside Transfer-Encoding) in OpenAI's
        shape."""
        self.refuse(InvalidRequest("the bytes received are not a valid HTTP request"))

    def refuse(self, error: HeadraceError) -> None:
        """Answers outside ASGI and ends the connection, once the requests before this one are
        answered; a second refusal is ignored."""
        self._end_head()
        if self._is_over:
            return
        self._refusal = error
        if self._is_idle:
            self._write_refusal(error)
        elif not self.cycle.more_body:
            return  # an answer is under way: nothing may be written into it
        elif self.pipeline:
            self.pipeline.popleft()  # the wrong request is this one, which waits for others
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._write_refusal(error)

    def _write_refusal(self, error: HeadraceError) -> None:
        """Writes it and closes our side; what still comes is read for a while, or the answer would
        be lost in a reset."""
        if self.transport.is_closing():
            return
        self.transport.write(refusal(error, self.connection_limits.errors))
        self.flow.resume_reading()
        self.transport.write_eof()
        self._leave_timer = self.loop.call_later(LEAVE_S, self.transport.close)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_over(self) -> bool:
        return self._refusal is not None or self._is_upgraded or self.transport.is_closing()

    def _start_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(
            self.connection_limits.header_timeout_s, self._head_timed_out
        )

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        seconds = self.connection_limits.header_timeout_s
        self.refuse(HeaderTimeout(f"the request's headers did not arrive within {seconds:g} s"))


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"request line and headers may have {MAX_HEAD_BYTES} bytes in {MAX_HEADERS} headers at most"
    )
