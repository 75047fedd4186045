"""The HTTP application: the table of routes, and the shell every exchange passes through.

The shell makes the request id, decides who may pass, refuses new work while draining, turns whatever goes wrong into a
clean answer, and counts. It is raw ASGI: nothing else sees a request before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import OverloadError, RateLimited, Unavailable
from headrace.base.telemetry.metrics import ROUTES
from headrace.front.server.anthropic import routes as anthropic
from headrace.front.server.anthropic.failures import SHAPE as ANTHROPIC
from headrace.front.server.auth import PUBLIC, Gatekeeper
from headrace.front.server.exchange import SCOPE_KEY, Exchange, Services, exchange_of
from headrace.front.server.failures import OPENAI, Failure, Shape, failure_of
from headrace.front.server.ids import client_label, request_id
from headrace.front.server.limits import TIMEOUT_HEADER, header_timeout_s, read_json
from headrace.front.server.native import admin, health, requests, tokenize
from headrace.front.server.openai import models, routes
from headrace.front.server.pooling import routes as pooling
from headrace.front.server.pooling import scoring
from headrace.front.server.sse import ClientGone, SlowReader, until_gone

Reader = Callable[[Exchange, Request], Awaitable[Response]]
Writer = Callable[[Exchange, Any], Any]
DRAIN_RETRY_S = 5.0
DISCARD_S = 2.0
log = logging.getLogger(__name__)


def make_app(services: Services) -> ASGIApp:
    """The application over `services`."""
    router = Router(
        [
            _posts("/v1/chat/completions", routes.post_chat),
            _posts("/v1/completions", routes.post_completions),
            _posts("/v1/embeddings", pooling.post_embeddings),
            _posts("/v2/embed", pooling.post_cohere_embed),
            _posts("/pooling", pooling.post_pooling),
            _posts("/classify", pooling.post_classify),
            *(_posts(path, scoring.post_score) for path in ("/score", "/v1/score")),
            *(
                _posts(path, scoring.post_rerank)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            _posts("/generative_scoring", scoring.post_generative_scoring),
            _posts("/tokenize", tokenize.post_tokenize),
            _posts("/detokenize", tokenize.post_detokenize),
            _posts("/v1/messages", anthropic.post_messages),
            _posts("/v1/messages/count_tokens", anthropic.post_count_tokens),
            _route("/api/hello", anthropic.get_hello),
            _route("/v1/models", _by_dialect(models.get_models, anthropic.get_models)),
            _route("/v1/models/{id:path}", _by_dialect(models.get_model, anthropic.get_model)),
            _route("/v1/requests", requests.get_ledger),
            _route("/v1/requests/{id}", requests.get_request),
            _route("/health", health.get_health),
            _route("/health/live", health.get_live),
            _route("/health/ready", health.get_ready),
            _route("/health/startup", health.get_startup),
            _route("/ping", health.get_health, "GET", "POST"),
            _route("/version", health.get_version),
            _route("/load", health.get_load),
            _route("/metrics", health.get_metrics),
            _route("/pause", admin.post_pause, "POST"),
            _route("/resume", admin.post_resume, "POST"),
            _route("/is_paused", admin.get_is_paused),
            _route("/reset_prefix_cache", admin.post_reset_prefix_cache, "POST"),
        ],
        redirect_slashes=False,
    )
    return Shell(services, router)


def _route(path: str, handler: Reader, *methods: str) -> Route:
    """A route without a body."""

    async def endpoint(request: Request) -> Response:
        exchange = exchange_of(request)
        work = handler(exchange, request)
        return await until_gone(request.receive, _awaited(work), abandon=exchange.services.abandon)

    return Route(path, endpoint, methods=list(methods) or ["GET"])


def _posts(path: str, handler: Writer) -> Route:
    """A route with a JSON body: read under its limits first, then handled until done or the client leaves."""

    async def endpoint(request: Request) -> Response:
        exchange = exchange_of(request)
        spec = exchange.services.server
        document = await read_json(
            request, max_bytes=spec.max_body_bytes, idle_s=spec.body_timeout_s
        )
        response: Response = await until_gone(
            request.receive, handler(exchange, document), abandon=exchange.services.abandon
        )
        return response

    return Route(path, endpoint, methods=["POST"])


def _by_dialect(openai: Reader, anthropic: Reader) -> Reader:
    """One path that two dialects share: the clients of one of them name its version in a header."""

    def handler(exchange: Exchange, request: Request) -> Awaitable[Response]:
        chosen = anthropic if shape_of(request.scope) is ANTHROPIC else openai
        return chosen(exchange, request)

    return handler


def shape_of(scope: Scope) -> Shape:
    """The shape of errors that the client of this exchange reads."""
    path = scope["path"]
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    named = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return ANTHROPIC if named and path.startswith("/v1/models") else OPENAI


async def _awaited(work: Awaitable[Response]) -> Response:
    return await work


class Shell:
    """The outermost layer of every exchange."""

    def __init__(self, services: Services, inner: ASGIApp) -> None:
        self.services = services
        self.inner = inner
        spec = services.server
        self.gatekeeper = Gatekeeper(
            api_key_digests=spec.api_key_digests,
            admin_key_digest=spec.admin_key_digest,
            public_metrics=spec.public_metrics,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one exchange, whatever happens inside."""
        assert scope["type"] == "http", f"no handler for {scope['type']}"
        exchange = Exchange(services=self.services, request_id=request_id())
        scope[SCOPE_KEY] = exchange
        scope["app"] = (
            self  # with an app in the scope starlette raises 404 and 405 instead of answering them
        )
        wire = _Wire(scope, receive, send, exchange)
        metrics = self.services.metrics
        metrics.add("headrace_http_requests_in_flight")
        try:
            exchange.tenant = self.gatekeeper.tenant(scope)
            self._refuse_while_draining(scope)
            exchange.timeout_s = header_timeout_s(wire.headers.get(TIMEOUT_HEADER.encode()))
            await self.inner(scope, wire.receive, wire.send)
        except (ClientGone, ClientDisconnect) as gone:
            wire.status = 499
            slow = isinstance(gone, SlowReader)
            metrics.add(
                "headrace_slow_readers_total" if slow else "headrace_client_disconnects_total"
            )
        except Exception as error:
            self._count_rejection(error)
            await wire.fail(failure_of(error, request_id=exchange.request_id))
        finally:
            exchange.held.close()
            metrics.add("headrace_http_requests_in_flight", -1)
            metrics.add(
                "headrace_http_requests_total",
                method=scope["method"],
                route=_template(scope["path"]),
                status=str(wire.status),
            )

    def _refuse_while_draining(self, scope: Scope) -> None:
        if self.services.draining and scope["path"] not in PUBLIC | {"/metrics"}:
            raise Unavailable("the server is shutting down", retry_after_s=DRAIN_RETRY_S)

    def _count_rejection(self, error: Exception) -> None:
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


def _template(path: str) -> str:
    """The route's template: a closed set, whatever clients ask for (P20)."""
    if path in ROUTES:
        return path
    for prefix in ("/v1/models", "/v1/requests"):
        if path.startswith(prefix + "/"):
            return prefix + "/{id}"
    return "other"


class _Wire:
    """receive and send of one exchange: marks the answer with its ids and knows whether the body was read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        self.scope = scope
        self.exchange = exchange
        self.status = 500
        self._receive = receive
        self._send = send
        self._started = False
        self.headers = headers = dict(scope["headers"])
        self._body_pending = (
            headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        )
        self._expects_continue = b"expect" in headers
        ident = exchange.request_id.encode()
        self._marks = [(b"x-request-id", ident), (b"request-id", ident)]
        label = client_label(headers.get(b"x-request-id"))
        if label is not None:
            self._marks.append((b"x-client-request-id", label.encode()))

    async def receive(self) -> Message:
        """The next message; notes the end of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._body_pending = False
        return message

    async def send(self, message: Message) -> None:
        """Sends; the first message gets the request's ids, and `connection: close` while draining."""
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            extra = list(self._marks)
            if self.exchange.services.draining:
                extra.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await self._send(message)

    async def fail(self, failure: Failure) -> None:
        """Answers with the failure. A body still on its way is discarded first (bounded), then the connection ends."""
        if self._started:
            log.error("request %s failed after its answer had begun", self.exchange.request_id)
            return
        headers = [(b"content-type", b"application/json"), *failure.headers()]
        if self._body_pending:
            if not self._expects_continue:
                await self._discard()
            if self._body_pending and not self.exchange.services.draining:
                headers.append((b"connection", b"close"))
        body = shape_of(self.scope).body(failure, self.exchange.request_id)
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send(
            {"type": "http.response.start", "status": failure.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _discard(self) -> None:
        """Reads on for two seconds at most: an answer sent into a client's upload would be lost in a reset."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while self._body_pending and (await self.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
