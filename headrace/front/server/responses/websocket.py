"""Responses over a WebSocket: requests as text frames, answered by the events of HTTP, each in a
frame of its own.

Requests with the same `stream_id` form a lane and are answered one after the other; lanes run at
the same time. What a connection answered last it remembers (also with store: false), so that the
next turn needs to bring only what is new; an error in a lane makes it forget the response that the
failed turn went on from. `generate: false` computes the prompt only. When the connection ends,
whatever still runs of it is aborted."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, defaultdict
from contextlib import aclosing, suppress
from dataclasses import replace

import msgspec
import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.base.errors import HeadraceError, InvalidRequest, RateLimited
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.frames import (
    document_of,
    next_text,
    send_event,
    while_open,
)
from headrace.front.server.http.auth import request_id
from headrace.front.server.http.failures import Failure, failure_of
from headrace.front.server.responses.run import Prepared, prepare, recall_from, run, store
from headrace.front.server.responses.schema import Json, parse_response

MAX_ACTIVE = 16
MAX_LANES = 32
MAX_AGE_S = 3600.0
MAX_KEPT = 16
MAX_KEPT_BYTES = 16 << 20
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
CLIENT_GONE = 499


class InvalidStreamId(InvalidRequest):
    """A stream_id that is no short word."""


class TooManyLanes(InvalidRequest):
    """More names of lanes than one connection may use."""


class ConcurrentRequest(RateLimited):
    """More responses at the same time than one connection may ask for."""


class Memory:
    """The items of the responses answered last, by id; bounded in number and in bytes of JSON."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[Json], int]] = OrderedDict()

    def get(self, ident: str) -> list[Json] | None:
        """The items up to and including a response."""
        items = self._kept.get(ident)
        if items is None:
            return None
        self._kept.move_to_end(ident)
        return items[0]

    def put(self, ident: str, items: list[Json]) -> None:
        """Remembers a response; forgets the oldest ones beyond the bounds."""
        self._kept[ident] = (items, sum(len(orjson.dumps(item)) for item in items))
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def forget(self, ident: str | None) -> None:
        """Forgets one."""
        if ident is not None:
            self._kept.pop(ident, None)

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._kept.values())


class WebSocketSession:
    """One connection."""

    def __init__(self, context: RequestContext, socket: WebSocket) -> None:
        self._request_context = context
        self._socket = socket
        self._memory = Memory()
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: set[asyncio.Task[None]] = set()
        self._stored = recall_from(context)

    async def serve(self) -> None:
        """Reads frames until the client leaves, the connection is too old or the server ends."""
        try:
            await while_open(
                self._request_context,
                self._socket,
                self._read(),
                max_age_s=MAX_AGE_S,
                grow_old=self._grow_old,
            )
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _grow_old(self) -> None:
        error = RateLimited(
            f"a connection may be open for {MAX_AGE_S / 60:g} minutes; open another one"
        )
        failure = failure_of(error, request_id=self._request_context.request_id)
        code = "websocket_connection_limit_reached"
        await self._send(
            error_event(msgspec.structs.replace(_error_fields(failure), code=code), {})
        )

    async def _read(self) -> None:
        while (text := await next_text(self._socket)) is not None:
            named: Json = {}
            try:
                await self._take(text, named)
            except HeadraceError as error:
                await self._fail(error, named)

    async def _take(self, text: str, named: Json) -> None:
        """One frame of the client; `named` gets its stream_id, for the answer."""
        document = await document_of(self._request_context, text)
        lane = document.get("stream_id")
        if lane is not None:
            if not isinstance(lane, str) or _LANE.fullmatch(lane) is None:
                raise InvalidStreamId(
                    f"stream_id: {lane!r:.80} given; allowed: 1 to 256 of A-Z a-z 0-9 _ . -",
                    field="stream_id",
                )
            named["stream_id"] = lane
        match document.get("type"):
            case "response.create":
                self._create(document, lane or "", named)
            case "response.steer":
                await self._send({**_no_steering(document), **named})
            case kind:
                raise InvalidRequest(
                    f"type: {kind!r:.80} given; allowed: response.create, response.steer",
                    field="type",
                )

    def _create(self, document: Json, lane: str, named: Json) -> None:
        if len(self._running) >= MAX_ACTIVE:
            raise ConcurrentRequest(
                f"{MAX_ACTIVE} responses are being made on this connection, its limit; wait "
                "for one to end",
                retry_after_s=1.0,
            )
        names = self._lanes.keys() - {""}
        if lane and lane not in names and len(names) >= MAX_LANES:
            raise TooManyLanes(
                f"stream_id: {MAX_LANES} names are in use on this connection, its limit",
                field="stream_id",
            )
        task = asyncio.ensure_future(self._respond(document, self._lanes[lane], named))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _respond(self, document: Json, lane: asyncio.Lock, named: Json) -> None:
        """One response. Nobody waits for this task: a client that leaves ends it without a word."""
        with suppress(WebSocketDisconnect):
            await self._answer(document, lane, named)

    async def _answer(self, document: Json, lane: asyncio.Lock, named: Json) -> None:
        first = self._request_context
        context = RequestContext(
            services=first.services, request_id=request_id(), tenant=first.tenant
        )
        status = CLIENT_GONE
        context.begin_trace(self._socket.scope)
        async with lane:
            prepared: Prepared | None = None
            try:
                route = context.services.line_routes["/v1/responses"]
                document = await route.named(context, document)
                await context.choose_model(document, runs=True)
                prepared = await self._prepared(context, document)
                async with aclosing(run(prepared)) as events:
                    async for event in events:
                        if event["type"] in ("response.completed", "response.incomplete"):
                            self._remember(prepared)
                        await self._send({**event, **named})
                status = 200
            except (WebSocketDisconnect, asyncio.CancelledError):
                raise
            except Exception as error:
                parent = document.get("previous_response_id")
                self._memory.forget(parent if isinstance(parent, str) else None)
                status = failure_of(error, request_id=context.request_id).status
                await self._fail(error, named, prepared)
            finally:
                context.held.close()
                context.over(status)

    async def _prepared(self, context: RequestContext, document: Json) -> Prepared:
        body = {key: value for key, value in document.items() if key != "background"}
        body["stream"] = True
        request = parse_response(body)
        prepared = await prepare(context, request, body, recall=self._recall)
        if document.get("generate") is False:
            params = msgspec.structs.replace(prepared.conversation.params, max_tokens=0)
            prepared.conversation = replace(prepared.conversation, params=params)
            prepared.stream.warm = True
        return prepared

    async def _recall(self, ident: str, *, alone: bool = False) -> list[Json] | None:
        items = self._memory.get(ident)
        return await self._stored(ident, alone=alone) if items is None else items

    def _remember(self, prepared: Prepared) -> None:
        output = prepared.stream.response["output"]
        self._memory.put(prepared.reply.id, [*prepared.history, *prepared.own_items, *output])

    async def _fail(self, error: Exception, named: Json, prepared: Prepared | None = None) -> None:
        failure = failure_of(error, request_id=self._request_context.request_id)
        if prepared is not None and prepared.stream.number:
            for event in prepared.stream.fail(failure):
                await self._send({**event, **named})
            await store(prepared)
            return
        await self._send(error_event(_error_fields(failure), named))

    async def _send(self, event: Json) -> None:
        await send_event(self._socket, event)


class _ErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """What of a failure is told in an error event."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None


def _error_fields(failure: Failure) -> _ErrorFields:
    return _ErrorFields(
        status=failure.status,
        type=failure.type,
        code=failure.code,
        message=failure.openai_message,
        param=failure.field,
    )


def error_event(failure: _ErrorFields, named: Json) -> Json:
    """The event for a request that never became a response."""
    error = msgspec.structs.asdict(failure)
    status = error.pop("status")
    return {"type": "error", "status": status, "error": error, **named}


def _no_steering(document: Json) -> Json:
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "this server does not steer running responses",
    }
    steer = {
        "id": None,
        "previous_response_id": str(document.get("previous_response_id") or "")[:128],
        "input": document.get("input") or [],
    }
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}


async def serve(context: RequestContext, socket: WebSocket) -> None:
    """A connection at /v1/responses."""
    await WebSocketSession(context, socket).serve()
