"""Streams end with an error event though the process that sent them is gone (1.4): the process that guards them, over
real sockets. Whole servers: tests/api/test_lifecycle.py, benchmarks/robustness/deaths.py."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import pytest

from headrace.front.server.http import stream_guard
from headrace.front.server.http.stream_guard import BETWEEN_STREAMS, StreamGuard
from headrace.front.server.http.stream_guard_worker import DESCRIPTOR, STREAMING

LAST = b"the end"


@contextlib.contextmanager
def connections(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Pairs of a server's end and a client's."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end).settimeout(20)
        yield pairs


def show(guard: StreamGuard, server: socket.socket, last: bytes = LAST) -> None:
    """As protocol.py does."""
    number = server.fileno()
    guard.states[number] = STREAMING
    socket.send_fds(guard.channel, [DESCRIPTOR.pack(number), last], [number])


async def died(guard: StreamGuard) -> None:
    """The end of the process that streamed, as the guard's process sees it."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(guard.channel)
    guard.channel.close()
    assert guard._process is not None
    assert await asyncio.to_thread(guard._process.wait, 20) == 0


async def test_what_streams_gets_its_last_bytes_and_nothing_else_does() -> None:
    guard = StreamGuard()
    with connections(4) as ((streams, a), (idle, b), (anew, c), (slow, d)):
        guard.start()
        for server in (streams, idle, slow):
            show(guard, server)
        guard.states[idle.fileno()] = BETWEEN_STREAMS
        show(guard, anew, b"of the request before")
        show(guard, anew)
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(b"." * 4096)
        for server in (streams, idle, anew, slow):
            server.close()  # its duplicate is what is left
        await died(guard)
        assert (a.recv(99), a.recv(99)) == (LAST, b"")
        assert b.recv(99) == b""
        assert (c.recv(99), c.recv(99)) == (LAST, b"")
        rest = b""
        while data := d.recv(1 << 20):
            rest += data
        assert rest.strip(b".") == b"", "nobody waits for a reader that is behind"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_guard_that_is_gone_is_replaced(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_guard, "RESTART_S", 0.0)
    guard = StreamGuard()
    with connections(1) as ((server, client),):
        guard.start()
        assert guard._process is not None
        first = guard._process
        first.send_signal(number)
        while guard._process is first:  # the test's own time-out is the bound
            await asyncio.sleep(0.01)
        show(guard, server)
        server.close()
        await died(guard)
        assert (client.recv(99), client.recv(99)) == (LAST, b"")


async def test_closing_ends_the_process_and_no_stream() -> None:
    guard = StreamGuard()
    with connections(1) as ((server, client),):
        guard.start()
        show(guard, server)
        guard.close()
        assert guard._process is not None and guard._process.poll() is not None
        server.send(b"goes on")
        assert client.recv(99) == b"goes on"
