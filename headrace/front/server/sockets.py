"""The shell of a WebSocket: what app.Shell is to a request, before and after the session inside it.

The same keys open it, the same drain closes it; connections are bounded in number. A page of
another site may not open one in a browser of somebody who runs a server without keys: such a page
has an Origin that is not loopback. A refusal is an ordinary HTTP answer to the upgrade."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.base.errors import HeadraceError, NotFound, Unavailable
from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.http.auth import (
    ID_HEADERS,
    UNIX,
    ApiKeyAuthenticator,
    check_origin,
    request_id,
)
from headrace.front.server.http.failures import failure_of

LEAVE_S = 2.0
Session = Callable[[RequestContext, WebSocket], Awaitable[None]]


class SocketShell:
    """Answers upgrades. `sessions`: path -> what is spoken there."""

    def __init__(
        self, services: Services, authenticator: ApiKeyAuthenticator, sessions: dict[str, Session]
    ) -> None:
        self._services = services
        self._authenticator = authenticator
        self._sessions = sessions
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection from its upgrade to its end."""
        context = RequestContext(services=self._services, request_id=request_id())
        metrics = self._services.metrics
        try:
            context.tenant = self._authenticator.tenant(scope)
            session = self._admit(scope)
        except HeadraceError as error:
            await _refuse(error, context, receive, send)
            return
        self._open += 1
        metrics.add("headrace_websockets_open")
        metrics.add("headrace_websockets_total")
        opened = time.monotonic()
        try:
            socket = WebSocket(scope, receive, send)
            await socket.accept(
                headers=[(name, context.request_id.encode()) for name in ID_HEADERS]
            )
            await session(context, socket)
        except WebSocketDisconnect:
            pass
        finally:
            self._open -= 1
            metrics.add("headrace_websockets_open", -1)
            metrics.observe("headrace_websocket_seconds", time.monotonic() - opened)

    def _admit(self, scope: Scope) -> Session:
        if self._services.draining:
            raise Unavailable("the server is shutting down", retry_after_s=5.0)
        session = self._sessions.get(scope["path"])
        if session is None:
            raise NotFound("unknown route")
        server = self._services.server
        if not self._services.keys.required and not server.host.startswith(UNIX):
            check_origin(scope)
        limit = server.max_websockets
        if self._open >= limit:
            self._services.metrics.add("headrace_rejections_total", reason="connections")
            raise Unavailable(
                f"this server has {limit} WebSocket connections open, its limit", retry_after_s=1.0
            )
        return session


async def _refuse(
    error: HeadraceError, context: RequestContext, receive: Receive, send: Send
) -> None:
    """Answers, then waits for the end of the connection: to the server an earlier return is a
    broken handshake."""
    failure = failure_of(error, request_id=context.request_id)
    ident = context.request_id.encode()
    body = context.services.errors.body(failure, context.request_id)
    headers = [
        (b"content-type", b"application/json"),
        *((name, ident) for name in ID_HEADERS),
        *failure.headers(),
    ]
    start = {
        "type": "websocket.http.response.start",
        "status": failure.status,
        "headers": headers,
    }
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
    with suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            for _ in ("connect", "answered", "closed"):
                await receive()
