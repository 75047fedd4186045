"""The thread that answers for a loop that is late: real sockets, and a loop that is held until the test lets it go."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.protocol import ConnectionLimits, guarded_protocol
from headrace.front.server.http.stand_in import MAX_SILENT, StandIn
from headrace.front.server.http.stream_guard import StreamGuard

PROBE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nUser-Agent: kube-probe\r\n\r\n"
POST = (
    b"POST /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 5\r\n\r\nwhole"
)


async def echo(request: Request) -> Response:
    return JSONResponse({"body": (await request.body()).decode()})


class HeldServer:
    """uvicorn in a thread, with a stand-in; `held` while the test wants its loop to stand still."""

    def __init__(self, listener: socket.socket, *, max_waiting: int) -> None:
        self.listener = listener
        self.free = threading.Event()
        self._max_waiting = max_waiting
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(300)

    async def _serve(self) -> None:
        limits = ConnectionLimits(max_connections=1000, header_timeout_s=300)
        metrics = Metrics()
        config = uvicorn.Config(
            Starlette(routes=[Route("/echo", echo, methods=["POST"])]),
            http=guarded_protocol(limits, metrics, StreamGuard()), lifespan="off", log_config=None, loop="none",
            ws="websockets-sansio",
        )  # fmt: skip
        server = uvicorn.Server(config)
        config.load()
        probes = {b"/health/live": lambda: JSONResponse({"status": "live"})}
        stand_in = StandIn(self.listener, probes, server, metrics, max_waiting=self._max_waiting)
        stand_in.start()
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        self.free.wait(300)  # the loop stands still: it accepts nothing and runs nothing
        await self._done.wait()
        stand_in.stop()
        for connection in server.server_state.connections:
            connection.transport.abort()
        await asyncio.sleep(0)

    def close(self) -> None:
        self.free.set()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()


def listening(address: str | tuple[str, int]) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(1024)
    return listener


@contextmanager
def held_server(address: str | tuple[str, int], *, max_waiting: int = 8) -> Iterator[HeldServer]:
    with (
        closing(listening(address)) as listener,
        closing(HeldServer(listener, max_waiting=max_waiting)) as server,
    ):
        yield server


def sent(server: HeldServer, *parts: bytes) -> socket.socket:
    connection = socket.socket(server.listener.family, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(server.listener.getsockname())
    for part in parts:
        connection.sendall(part)
    return connection


def answer(connection: socket.socket) -> tuple[int, bytes, dict[str, object]]:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    connection.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head[9:12]), head, json.loads(body)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_probe_is_answered_while_the_loop_stands_still(kind: str, tmp_path: Path) -> None:
    address = ("127.0.0.1", 0) if kind == "tcp" else str(tmp_path / "listening")
    with held_server(address) as server:
        for _ in range(3):
            status, head, document = answer(sent(server, PROBE))
            assert (status, document) == (200, {"status": "live"})
            assert b"\r\nx-request-id: req-" in head and b"\r\nconnection: close" in head


WELL_FORMED = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (WELL_FORMED + b"x: 1\r\n" * 64 + b"\r\n", 431),
        (WELL_FORMED + b"Host: other\r\n\r\n", 400),
        (WELL_FORMED + b"x\x00y: 1\r\n\r\n", 400),
        (b"GET /health/live HTTP/1.1\r\nx: host:\r\n\r\n", 400),
        (b"GET /health/live HTTP/1.2\r\nHost: localhost\r\n\r\n", 400),
        (WELL_FORMED + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ],
)
def test_what_the_loop_refuses_is_refused_while_it_stands_still(
    request_bytes: bytes, status: int
) -> None:
    with held_server(("127.0.0.1", 0)) as server:
        connection = sent(server, request_bytes)
        probe = answer(sent(server, PROBE))
        assert probe[0] == 200  # the thread has seen both by now
        server.free.set()
        assert answer(connection)[0] == status


def test_other_connections_are_the_loops_with_every_byte(tmp_path: Path) -> None:
    with held_server(("127.0.0.1", 0)) as server:
        whole = sent(server, POST)
        unfinished = sent(server, POST[:30])
        silent = sent(server)
        assert answer(sent(server, PROBE))[0] == 200, "behind them in the queue"
        server.free.set()
        assert answer(whole)[2] == {"body": "whole"}
        for connection, rest in ((unfinished, POST[30:]), (silent, POST)):
            connection.sendall(rest)
            assert answer(connection)[2] == {"body": "whole"}


def test_what_the_loop_does_not_take_is_bounded(tmp_path: Path) -> None:
    with held_server(("127.0.0.1", 0), max_waiting=2) as server:
        waiting = [sent(server, POST) for _ in range(2)]
        assert answer(sent(server, PROBE))[0] == 200
        status, head, document = answer(sent(server, POST))
        assert status == 503 and b"\r\nretry-after: " in head and document["error"]
        assert answer(sent(server, PROBE))[0] == 200
        server.free.set()
        for connection in waiting:
            assert answer(connection)[2] == {"body": "whole"}


def test_silent_connections_do_not_keep_probes_waiting(tmp_path: Path) -> None:
    with held_server(("127.0.0.1", 0), max_waiting=8) as server:
        silent = [sent(server) for _ in range(MAX_SILENT + 8)]
        assert answer(sent(server, PROBE))[0] == 200
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        PROBE.replace(b"GET", b"POST"),
        PROBE.replace(b"/health/live", b"/health/live?"),
        PROBE.replace(b"/health/live", b"//health/live"),
        PROBE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PROBE.replace(b"Host: localhost\r\n", b""),
        PROBE[:-2],
    ],
)
def test_what_is_not_plainly_a_probe_is_the_loops(request_: bytes) -> None:
    with held_server(("127.0.0.1", 0), max_waiting=0) as server:
        assert answer(sent(server, request_))[0] == 503, "none may wait here: it is refused"
