"""The HTTP application: the shell every context passes through on its way to a route, and the kinds
of routes that the table (table.py) has.

The shell makes the request id, decides who may pass, refuses new work while draining, turns
whatever goes wrong into a clean answer, and counts. It is raw ASGI: nothing else sees a request
before it. A route with a JSON body reads it under its limits and runs its handler beside a watch on
the connection; the watch ends the work when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import InvalidRequest, OverloadError, RateLimited, Unavailable
from headrace.base.telemetry.metrics import template_of
from headrace.front.server.administration import api as admin
from headrace.front.server.administration import named
from headrace.front.server.anthropic.failures import SHAPE as ANTHROPIC
from headrace.front.server.cohere.failures import SHAPE as COHERE
from headrace.front.server.conversation.context import (
    SCOPE_KEY,
    RequestContext,
    Services,
    context_of,
    json_response,
)
from headrace.front.server.http.auth import ID_HEADERS, PROBES, client_label, request_id
from headrace.front.server.http.failures import ENDS, ErrorFormat, Failure, failure_of
from headrace.front.server.http.limits import read_json
from headrace.front.server.http.sse import (
    CONNECTION_KEY,
    NO_CONNECTION,
    ClientGone,
    SlowReader,
    until_gone,
)
from headrace.front.server.native.load_header import FORMAT_HEADER, load_header
from headrace.front.server.ollama.failures import SHAPE as OLLAMA
from headrace.front.server.ollama.named_requests import standing_for
from headrace.front.server.openapi import ApiRoute
from headrace.front.server.sockets import SocketShell
from headrace.front.server.webui.pages import PAGES

DRAIN_RETRY_S = 5.0
DISCARD_S = 2.0
TIMING_HEADER = b"x-headrace-timing"
"""A request with this header is told where its time went: Server-Timing, or a comment at the end of
a stream."""
TIMEOUT_HEADER = "x-request-timeout-s"
MAX_TIMEOUT_S = 86400
PUBLIC = PROBES | PAGES.keys()
"""Paths that need no key."""
Reader = Callable[[RequestContext, Request], Awaitable[Response]]
Writer = Callable[[RequestContext, Any], Any]
Changer = Callable[[RequestContext, Request, Any], Awaitable[Response]]
log = logging.getLogger(__name__)


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


def shape_of(scope: Scope) -> ErrorFormat:
    """The shape of errors that the client of this context reads."""
    path = scope["path"]
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    if path in ("/v2/chat", "/v1/tokenize", "/v1/detokenize"):
        return COHERE
    if path.startswith("/api/") and path not in PUBLIC:
        return OLLAMA
    named = any(name == b"anthropic-version" for name, _ in scope["headers"])
    if named and path.startswith("/v1/models"):
        return ANTHROPIC
    context: RequestContext = scope[SCOPE_KEY]
    return context.services.errors


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


def reads(path: str, handler: Reader, *methods: str) -> ApiRoute:
    """A route without a body."""

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        work = handler(context, request)
        return await until_gone(request.receive, _awaited(work), abandon=context.services.abandon)

    return ApiRoute(path, endpoint, methods=methods or ("GET",), doc=handler.__doc__ or "")


def uploads(path: str, handler: Reader) -> ApiRoute:
    """A route whose handler reads the body itself."""

    async def endpoint(request: Request) -> Response:
        return await handler(context_of(request), request)

    return ApiRoute(path, endpoint, methods=("POST",), doc=handler.__doc__ or "")


def posts(
    path: str,
    handler: Writer,
    *bodies: type[msgspec.Struct],
    sockets: bool = False,
    queued: bool = False,
    named: Writer | None = None,
) -> ApiRoute:
    """A route with a JSON body: read under its limits first, then handled until done or the client
    leaves. `queued`: it needs the engine and a place in its queue, and is refused by its headers
    while that is full. `named`: the body for one that names a model which is not served, if not by
    the schemas (ollama/named_requests.py)."""
    served = named or standing_for(*bodies)

    async def chosen(context: RequestContext, document: Any) -> Any:
        if _names_another(context, document):
            document = await served(context, document)
        if context.services.models is not None:
            await context.choose_model(document, runs=queued)
        return await handler(context, document)

    chosen.__doc__ = handler.__doc__
    return posts_named(path, chosen, *bodies, sockets=sockets, queued=queued)


def posts_named(
    path: str,
    handler: Writer,
    *bodies: type[msgspec.Struct],
    sockets: bool = False,
    queued: bool = False,
    method: str = "POST",
) -> ApiRoute:
    """As `posts`, of a handler that chooses its model itself."""

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        if queued:
            context.services.engine.check_queue(context.deadline_s(None))
        document = await _document(request, context)
        work = handler(context, document)
        return await until_gone(request.receive, work, abandon=context.services.abandon)

    doc = handler.__doc__ or ""
    return ApiRoute(path, endpoint, methods=(method,), doc=doc, bodies=bodies, sockets=sockets)


def administers(route: named.NamedRoute) -> ApiRoute:
    """A route of an operation: its fields stand in the query, the path, or a JSON body."""
    operation = route.operation

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        headers = request.headers
        is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        body: object = {} if is_empty else await _document(request, context)
        fields = admin.fields_of(request, body, route.reads, route.fixed)
        work = admin.answer(context, operation, fields)
        document = await until_gone(request.receive, work, abandon=context.services.abandon)
        # A health check by status: what it tells of a dead engine is no success.
        status = 503 if document.get("status") == "unavailable" else 200
        return json_response(route.answer(document), status=status)

    return ApiRoute(
        route.path,
        endpoint,
        methods=route.methods or (operation.method,),
        doc=operation.doc,
        bodies=(route.reads,) if route.has_body and route.reads.__struct_fields__ else (),
        query=None if route.has_body else route.reads,
        defaults=route.fixed,
    )


def _names_another(context: RequestContext, document: object) -> bool:
    """Whether a body names a model that is not served."""
    name = document.get("model") if isinstance(document, dict) else None
    return isinstance(name, str) and name not in context.services.all_names


async def _document(request: Request, context: RequestContext) -> object:
    """The JSON body, read under the server's limits."""
    services = context.services
    length = request.headers.get("content-length", "0")
    context.body_bytes = int(length) if length.isdecimal() else 0
    return await read_json(request, services.server, context.make_room, services.body_checks)


def posts_to(path: str, handler: Changer, *bodies: type[msgspec.Struct]) -> ApiRoute:
    """A route with a JSON body for the thing that its path names."""

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        return await handler(context, request, await _document(request, context))

    return ApiRoute(path, endpoint, methods=("POST",), doc=handler.__doc__ or "", bodies=bodies)


async def _awaited(work: Awaitable[Response]) -> Response:
    return await work
