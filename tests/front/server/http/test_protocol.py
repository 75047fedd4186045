"""A connection that becomes a WebSocket is no longer under the clocks of HTTP: one of them wrote an answer into it."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.protocol import ConnectionLimits, GuardedProtocol


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(await socket.receive_text())


async def test_no_clock_of_headers_runs_behind_an_upgrade() -> None:
    seen: list[GuardedProtocol] = []

    class Guarded(GuardedProtocol):
        connection_limits = ConnectionLimits(max_connections=10, header_timeout_s=30)
        connection_metrics = Metrics()
        strangers = {}

        def connection_made(self, transport: Any) -> None:
            seen.append(self)
            super().connection_made(transport)

    app = Starlette(routes=[WebSocketRoute("/", echo)])
    config = uvicorn.Config(
        app, http=Guarded, ws="websockets-sansio", port=0, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server._serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with connect(f"ws://127.0.0.1:{port}/") as socket:
        assert seen[0]._head_timer is None and not seen[0].strangers
        await socket.send("still here")
        assert await socket.recv() == "still here"
    server.should_exit = True
    await serving
