"""How long a connection may live (contract 5): the session itself over a scripted transport."""

from __future__ import annotations

import asyncio
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.body_budget import BodyBudget
from headrace.front.server.http.body_checks import BodyChecks
from headrace.front.server.responses import websocket


async def test_a_connection_that_is_too_old_is_told_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert websocket.MAX_AGE_S == 60 * 60
    monkeypatch.setattr(websocket, "MAX_AGE_S", 0.05)
    sent: list[Message] = []
    given: list[Message] = [{"type": "websocket.connect"}]

    async def receive() -> Message:
        return given.pop() if given else await asyncio.Future[Any]()

    async def send(message: Message) -> None:
        sent.append(message)

    server = SimpleNamespace(max_body_bytes=1 << 20)
    services: Any = SimpleNamespace(abandon=asyncio.Event(), server=server)
    socket = WebSocket({"type": "websocket"}, receive, send)
    await socket.accept()
    async with asyncio.timeout(5):
        await websocket.serve(RequestContext(services=services, request_id="req-1"), socket)
    told = json.loads(sent[1]["text"])
    assert told["type"] == "error"
    assert told["error"]["code"] == "websocket_connection_limit_reached"
    assert sent[2]["type"] == "websocket.close" and sent[2]["code"] == 1001
    assert len(sent) == 3


async def test_a_client_that_left_is_no_lost_exception() -> None:
    """Nobody waits for the task of a response: what it raised came into the log as an error of ours."""
    lost: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    frame = json.dumps({"type": "response.create", "max_output_tokens": "x"})
    given: list[Message] = [
        {"type": "websocket.receive", "text": frame},
        {"type": "websocket.connect"},
    ]
    tried = asyncio.Event()

    async def receive() -> Message:
        if given:
            return given.pop()
        await tried.wait()
        for _ in range(3):  # the task ends before the session does, which would wait for it
            await asyncio.sleep(0)
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            tried.set()
            raise OSError("the peer is gone")

    server = SimpleNamespace(max_body_bytes=1 << 20, log_slow_s=None)
    services: Any = SimpleNamespace(
        abandon=asyncio.Event(),
        server=server,
        tracer=None,
        bodies=BodyBudget(1 << 20),
        body_checks=BodyChecks(),
    )
    socket = WebSocket({"type": "websocket"}, receive, send)
    await socket.accept()
    async with asyncio.timeout(5):
        await websocket.serve(RequestContext(services=services, request_id="req-1"), socket)
    gc.collect()
    assert not lost
