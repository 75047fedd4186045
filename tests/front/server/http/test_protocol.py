"""A connection that becomes a WebSocket is no longer under the clocks of HTTP: one of them wrote an answer into it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.protocol import ConnectionLimits, GuardedProtocol
from headrace.front.server.http.stream_guard import StreamGuard


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(await socket.receive_text())


async def answer(request: Request) -> Response:
    return PlainTextResponse("there")


async def test_no_clock_of_headers_runs_behind_an_upgrade() -> None:
    seen: list[GuardedProtocol] = []

    class Guarded(GuardedProtocol):
        connection_limits = ConnectionLimits(max_connections=10, header_timeout_s=30)
        connection_metrics = Metrics()
        stream_guard = StreamGuard()
        strangers = {}

        def connection_made(self, transport: Any) -> None:
            seen.append(self)
            super().connection_made(transport)

    app = Starlette(routes=[WebSocketRoute("/", echo)])
    async with serving(app, Guarded) as port, connect(f"ws://127.0.0.1:{port}/") as socket:
        assert seen[0]._head_timer is None and not seen[0].strangers
        await socket.send("still here")
        assert await socket.recv() == "still here"


@asynccontextmanager
async def serving(app: Starlette, protocol: type[GuardedProtocol]) -> AsyncIterator[int]:
    """uvicorn over the app; its port."""
    config = uvicorn.Config(
        app, http=protocol, ws="websockets-sansio", port=0, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server._serve())
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def test_a_connection_goes_with_its_end_and_waits_for_no_collector() -> None:
    """Defect: the scope of its last request knew the connection, and the connection the scope."""
    seen: list[weakref.ref[GuardedProtocol]] = []

    class Guarded(GuardedProtocol):
        connection_limits = ConnectionLimits(max_connections=10, header_timeout_s=30)
        connection_metrics = Metrics()
        stream_guard = StreamGuard()
        strangers = {}

        def connection_made(self, transport: Any) -> None:
            seen.append(weakref.ref(self))
            super().connection_made(transport)

    app = Starlette(routes=[Route("/", answer)])
    gc.disable()
    try:
        async with serving(app, Guarded) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readuntil(b"there")).startswith(b"HTTP/1.1 200")
            writer.close()
            while seen[0]() is not None:  # the test's own time-out is the bound
                await asyncio.sleep(0.001)
    finally:
        gc.enable()
