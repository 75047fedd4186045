"""The HTTP application: the shell every context passes through on its way to a route (table.py).

The shell makes the request id, decides who may pass, refuses new work while draining, turns
whatever goes wrong into a clean answer, and counts. It is raw ASGI: nothing else sees a request
before it."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import InvalidRequest, OverloadError, RateLimited, Unavailable
from headrace.base.telemetry.metrics import template_of
from headrace.front.server.administration.api import AdminAuthenticator, api_authenticator
from headrace.front.server.conversation.context import SCOPE_KEY, RequestContext, Services
from headrace.front.server.http.auth import ID_HEADERS, UNIX, client_label, request_id
from headrace.front.server.http.failures import ENDS, Failure, failure_of
from headrace.front.server.http.sse import CONNECTION_KEY, NO_CONNECTION, ClientGone, SlowReader
from headrace.front.server.native.load_header import FORMAT_HEADER, load_header
from headrace.front.server.openai import realtime
from headrace.front.server.responses import websocket
from headrace.front.server.sockets import Session, SocketShell
from headrace.front.server.table import PUBLIC, admin_routes, shape_of, table

DRAIN_RETRY_S = 5.0
DISCARD_S = 2.0
TIMING_HEADER = b"x-headrace-timing"
"""A request with this header is told where its time went: Server-Timing, or a comment at the end of
a stream."""
TIMEOUT_HEADER = "x-request-timeout-s"
MAX_TIMEOUT_S = 86400
log = logging.getLogger(__name__)


def make_app(services: Services) -> ASGIApp:
    """The application over `services`."""
    authenticator = api_authenticator(services.server, services.keys, public=PUBLIC)
    sessions: dict[str, Session] = {
        "/v1/responses": websocket.serve,
        "/v1/realtime": realtime.serve,
    }
    sockets = SocketShell(services, authenticator, sessions)
    return Shell(services, Router(table(), redirect_slashes=False), authenticator, sockets)


def make_admin_app(services: Services) -> ASGIApp:
    """The admin API over `services`; it answers while the server drains too."""
    spec = services.server
    authenticator = AdminAuthenticator(
        spec.admin_key_digest,
        readonly=spec.admin_readonly,
        socket_file=(spec.admin_listen or "").startswith(UNIX),
    )
    router = Router(admin_routes(), redirect_slashes=False)
    return Shell(services, router, authenticator, None)


class Authenticator(Protocol):
    """Who may ask: see ApiKeyAuthenticator."""

    def tenant(self, scope: Scope) -> str:
        """The tenant of the request, or why it is refused."""
        ...


class Shell:
    """The outermost layer of every context."""

    def __init__(
        self,
        services: Services,
        inner: ASGIApp,
        authenticator: Authenticator,
        sockets: SocketShell | None,
    ) -> None:
        self.services = services
        self.inner = inner
        self.authenticator = authenticator
        self.sockets = sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one context, whatever happens inside."""
        if self.sockets is not None:
            scope = _below(self.services.server.root_path, scope)
        if scope["type"] == "websocket" and self.sockets is not None:
            await self.sockets(scope, receive, send)
            return
        assert scope["type"] == "http", f"no handler for {scope['type']}"
        context = scope[SCOPE_KEY] = RequestContext(services=self.services, request_id=request_id())
        # With an app in the scope starlette raises 404 and 405 instead of answering them.
        scope["app"] = self
        wire = _Wire(scope, context, receive, send)
        metrics = self.services.metrics
        metrics.add("headrace_http_requests_in_flight")
        context.sent_id = client_label(wire.headers.get(b"x-request-id"))
        try:
            context.tenant = self.authenticator.tenant(scope)
            if context.tenant or not self.services.keys.required:
                scope.get(CONNECTION_KEY, NO_CONNECTION).keep_place()
            self._refuse_while_draining(scope)
            context.tells_timing = TIMING_HEADER in wire.headers
            context.begin_trace(scope)
            context.timeout_s = _header_timeout_s(wire.headers.get(TIMEOUT_HEADER.encode()))
            await self.inner(scope, wire.receive, wire.send)
        except (ClientGone, ClientDisconnect) as gone:
            wire.status = 499
            slow = isinstance(gone, SlowReader)
            metrics.add(
                "headrace_slow_readers_total" if slow else "headrace_client_disconnects_total"
            )
        except ENDS:
            raise
        except BaseException as error:
            self._count_rejection(error)
            await wire.fail(failure_of(error, request_id=context.request_id))
        finally:
            context.held.close()
            context.over(wire.status)
            metrics.add("headrace_http_requests_in_flight", -1)
            metrics.add(
                "headrace_http_requests_total",
                method=scope["method"],
                route=template_of(scope["path"]),
                status=str(wire.status),
            )

    def _refuse_while_draining(self, scope: Scope) -> None:
        if (
            self.sockets is not None  # administration goes on while the API drains
            and self.services.draining
            and scope["path"] not in PUBLIC | {"/metrics"}
        ):
            raise Unavailable("the server is shutting down", retry_after_s=DRAIN_RETRY_S)

    def _count_rejection(self, error: BaseException) -> None:
        if not isinstance(error, OverloadError):
            return
        reason = "unavailable"
        if isinstance(error, RateLimited):
            reason = "key_limit"
        elif self.services.draining:
            reason = "draining"
        elif self.services.ready:
            reason = "queue_full"
        self.services.metrics.add("headrace_rejections_total", reason=reason)


def _below(root: str, scope: Scope) -> Scope:
    """The scope with its path below `root`, where that stands before it: some proxies leave their
    prefix in place."""
    path = scope["path"]
    return (
        {**scope, "path": path.removeprefix(root)}
        if root and path.startswith(root + "/")
        else scope
    )


def _header_timeout_s(value: bytes | None) -> float | None:
    """The deadline in an X-Request-Timeout-S header: seconds, above 0 and at most a day."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        shown = value[:50].decode("ascii", "replace")
        raise InvalidRequest(
            f"{TIMEOUT_HEADER}: {shown!r} given; allowed: seconds above 0, at most {MAX_TIMEOUT_S}",
            field=TIMEOUT_HEADER,
        )
    return seconds


@dataclass(eq=False)
class _Wire:
    """receive and send of one context: marks the answer with its ids and knows whether the body was
    read."""

    scope: Scope
    context: RequestContext
    _receive: Receive
    _send: Send
    status: int = 500
    _started: bool = False

    def __post_init__(self) -> None:
        self.headers: dict[bytes, bytes] = dict(self.scope["headers"])
        length = self.headers.get(b"content-length", b"0")
        self._body_pending = length != b"0" or b"transfer-encoding" in self.headers

    async def receive(self) -> Message:
        """The next message; notes the end of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._body_pending = False
        return message

    async def send(self, message: Message) -> None:
        """Sends; the first message gets the request's ids, and `connection: close` while
        draining."""
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            extra = [(name, self.context.shown_id(name).encode()) for name in ID_HEADERS]
            label = self.context.sent_id or self.context.client_label
            if label is not None:
                extra.append((b"x-client-request-id", label.encode()))
            if self.context.tells_timing and self.context.timeline is not None:
                timing = self.context.timeline.server_timing()
                extra.append((b"server-timing", timing.encode()))
            if version := self.context.services.engine.weights_version:
                extra.append((b"x-weights-version", version.encode("latin-1", "replace")))
            if (form := self.headers.get(FORMAT_HEADER)) is not None:
                extra += await load_header(self.context.services, form)
            if self.context.services.draining:
                extra.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await self._send(message)

    async def fail(self, failure: Failure) -> None:
        """Answers with the failure. A body still on its way is discarded first (bounded), then the
        connection ends."""
        if self._started:
            log.error("request %s failed after its answer had begun", self.context.request_id)
            return
        headers = [(b"content-type", b"application/json"), *failure.headers()]
        if self._body_pending:
            if b"expect" not in self.headers:
                await self._discard()
            if self._body_pending and not self.context.services.draining:
                headers.append((b"connection", b"close"))
        body = shape_of(self.scope).body(failure, self.context.request_id)
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send(
            {"type": "http.response.start", "status": failure.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _discard(self) -> None:
        """Reads on for two seconds at most: an answer sent into a client's upload would be lost in
        a reset."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while self._body_pending and (await self.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
