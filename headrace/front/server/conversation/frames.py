"""What every WebSocket of the API does alike: it reads frames until its client leaves, it has grown
old or the server ends; each frame is a JSON object, read under the limits of bodies; and an answer
waits for its reader for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.body_budget import WAIT_S, BodyRoom
from headrace.front.server.http.limits import parse_body
from headrace.front.server.http.sse import STALL_S

GOING_AWAY, UNSUPPORTED, RESTARTING = 1001, 1003, 1012
Json = dict[str, Any]


async def while_open(
    context: RequestContext,
    socket: WebSocket,
    work: Coroutine[Any, Any, None],
    *,
    max_age_s: float,
    grow_old: Callable[[], Awaitable[None]],
) -> None:
    """Runs `work` to its end, of the connection's life at most; `grow_old` tells the client that it
    is over."""
    working = asyncio.ensure_future(work)
    over = asyncio.ensure_future(context.services.abandon.wait())
    try:
        await asyncio.wait({working, over}, timeout=max_age_s, return_when="FIRST_COMPLETED")
        if working.done():
            working.result()
        elif over.done():
            await close(socket, RESTARTING)
        else:
            await grow_old()
            await close(socket, GOING_AWAY)
    finally:
        for task in (working, over):
            task.cancel()
        await asyncio.gather(working, over, return_exceptions=True)


async def next_text(socket: WebSocket) -> str | None:
    """The next frame; None where the client has left, or has sent bytes, which ends the
    connection."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        return None
    text: str | None = message.get("text")
    if text is None:
        await close(socket, UNSUPPORTED)
    return text


async def close(socket: WebSocket, code: int = 1000) -> None:
    """Closes a connection that may be closed already, from either side."""
    if socket.application_state is WebSocketState.CONNECTED:
        with suppress(WebSocketDisconnect):
            await socket.close(code)


async def document_of(context: RequestContext, text: str) -> Json:
    """The object in a frame; it takes room among the bodies while it is read."""
    room = BodyRoom(context.services.bodies, context.tenant)
    try:
        await room.grow_to(len(text), wait_s=WAIT_S)
        document = await parse_body(
            text.encode("utf-8", "surrogatepass"), context.services.body_checks
        )
    finally:
        room.close()
    if not isinstance(document, dict):
        raise InvalidRequest("a message must be a JSON object")
    return document


async def send_event(socket: WebSocket, event: Json) -> None:
    """A client that takes nothing for too long is left; one that was told to go has left."""
    if socket.application_state is WebSocketState.DISCONNECTED:
        raise WebSocketDisconnect(1006)
    try:
        async with asyncio.timeout(STALL_S):
            await socket.send_text(orjson.dumps(event).decode())
    except TimeoutError:
        raise WebSocketDisconnect(1006) from None
