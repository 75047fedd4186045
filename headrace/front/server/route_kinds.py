"""The kinds of rows that the table of routes (table.py) has: what reads a body, chooses a model,
and runs a handler.

A route with a JSON body reads it under its limits and runs its handler beside a watch on the
connection; the watch ends the work when the client leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.administration import api as admin
from headrace.front.server.administration import named
from headrace.front.server.conversation.context import (
    RequestContext,
    context_of,
    json_response,
)
from headrace.front.server.http.limits import read_json
from headrace.front.server.http.sse import until_gone
from headrace.front.server.openapi import ApiRoute

Reader = Callable[[RequestContext, Request], Awaitable[Response]]
Writer = Callable[[RequestContext, Any], Any]
Changer = Callable[[RequestContext, Request, Any], Awaitable[Response]]


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
) -> ApiRoute:
    """A route with a JSON body: read under its limits first, then handled until done or the client
    leaves. `queued`: it needs the engine and a place in its queue, and is refused by its headers
    while that is full."""

    async def chosen(context: RequestContext, document: Any) -> Any:
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
