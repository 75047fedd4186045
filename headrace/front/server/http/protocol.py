"""The HTTP/1.1 connection: uvicorn's httptools protocol with the limits that must hold before a
request exists.

Headers are bounded in number, in bytes and in time, connections in number; a request line or header
block that breaks a bound is answered in OpenAI's error shape and the connection is closed.
Everything after the headers is limits.py."""

from __future__ import annotations

import asyncio
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
from headrace.front.server.http.sse import ABORT_KEY
from headrace.front.server.http.stand_in import refusal

MAX_HEADERS = 64


MAX_HEAD_BYTES = 64 * 1024


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


def guarded_protocol(limits: ConnectionLimits, metrics: Metrics) -> type[asyncio.Protocol]:
    """The protocol class uvicorn is given as `http`; a class, because uvicorn constructs it per
    connection."""

    class Guarded(GuardedProtocol):
        connection_limits = limits
        connection_metrics = metrics

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    """Invariant: while a header block is incomplete, `_head_timer` runs and `_head_bytes` counts
    what arrived of it."""

    connection_limits: ConnectionLimits
    connection_metrics: Metrics

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _header_bytes = 0

    def connection_made(  # type: ignore[override]  # uvicorn's signature
        self, transport: asyncio.Transport
    ) -> None:
        """Refuses connections over the limit; starts the clock of the first header block."""
        super().connection_made(transport)
        if len(self.connections) > self.connection_limits.max_connections:
            self.connection_metrics.add("headrace_rejections_total", reason="connections")
            self.refuse(Unavailable("too many open connections", retry_after_s=1.0))
            return
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; what it holds of an unfinished header block is bounded by one read
        beyond the limit."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_timer is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(_head_too_large())

    def on_message_begin(self) -> None:
        """A further request on a kept connection: its header block gets a clock of its own."""
        super().on_message_begin()
        self._header_bytes = 0
        abort = self.transport.abort
        self.scope[ABORT_KEY] = abort  # type: ignore[literal-required]  # a key of ours
        if self._head_timer is None:
            self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts complete headers (trailers of a chunked body too)."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        if len(self.headers) > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self.refuse(_head_too_large())

    def on_headers_complete(self) -> None:
        """Starts the request, unless it was refused while its headers arrived."""
        self._end_head()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Ignores the body of a refused request."""
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ignores the end of a refused request."""
        if self.cycle is not None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses (bad syntax, Content-Length beside Transfer-Encoding) in OpenAI's
        shape."""
        self.refuse(InvalidRequest("the bytes received are not a valid HTTP request"))

    def refuse(self, error: HeadraceError) -> None:
        """Answers outside ASGI and closes; a second refusal on a closing connection is ignored."""
        self._end_head()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.close()  # an answer is under way: nothing may be written into it
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(refusal(error, self.connection_limits.errors))
        self.transport.close()

    def _start_head(self) -> None:
        self._head_bytes = 0
        seconds = self.connection_limits.header_timeout_s
        self._head_timer = self.loop.call_later(seconds, self._head_timed_out)

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
