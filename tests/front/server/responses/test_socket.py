"""How long a connection may live (contract 5): the session itself over a scripted transport."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from headrace.front.server.exchange import Exchange
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
        await websocket.serve(Exchange(services=services, request_id="req-1"), socket)
    told = json.loads(sent[1]["text"])
    assert told["type"] == "error"
    assert told["error"]["code"] == "websocket_connection_limit_reached"
    assert sent[2]["type"] == "websocket.close" and sent[2]["code"] == 1001
    assert len(sent) == 3
