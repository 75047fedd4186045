"""Frames of WebSockets: what is sent behind the end is for nobody."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.front.server.conversation.frames import close, next_text, send_event

SCOPE = {"type": "websocket", "path": "/", "headers": []}


class Client:
    """Sends these messages and keeps what it is sent."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = [{"type": "websocket.connect"}, *messages]
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def test_an_answer_to_a_client_that_was_told_to_go_is_no_failure() -> None:
    """A bytes frame ended a realtime session, and the transcript on its way was a failure of the server's."""
    client = Client({"type": "websocket.receive", "bytes": b"\\xff"})
    socket = WebSocket(SCOPE, client.receive, client.send)
    await socket.accept()
    assert await next_text(socket) is None
    with pytest.raises(WebSocketDisconnect):
        await send_event(socket, {"type": "error"})
    await close(socket)
    assert [message["type"] for message in client.sent] == ["websocket.accept", "websocket.close"]
