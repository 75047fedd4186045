"""Streams and disconnects at the ASGI border: scripted receive and send, the code under test is real."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from headrace.base.errors import EngineDead, Unavailable
from headrace.front.server.http import sse
from headrace.front.server.http.failures import OPENAI
from headrace.front.server.http.sse import (
    CONNECTION_KEY,
    ClientConnection,
    ClientGone,
    EventStream,
    SlowReader,
    started,
    until_gone,
)


class Border(ClientConnection):
    """An ASGI connection: collects what is sent; `leave` is the client's disconnect."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.stuck = False
        self.kept: list[bytes] = []

    def abort(self) -> None:
        self.left.set()

    def keep_stream(self, last_events: bytes) -> None:
        assert self.sent[-1]["type"] == "http.response.start", "not before the answer has begun"
        self.kept.append(last_events)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.stuck and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """Events of a generation; `closed` tells that its work was ended."""

    def __init__(self, *events: bytes | Exception, endless: bool = False) -> None:
        self.closed = False
        self.stream = self._run(events, endless)

    async def _run(
        self, events: tuple[bytes | Exception, ...], endless: bool
    ) -> AsyncGenerator[bytes, None]:
        try:
            for event in events:
                if isinstance(event, Exception):
                    raise event
                yield event
            if endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def answer(
    source: Source,
    border: Border,
    abandon: asyncio.Event | None = None,
    *,
    ping_s: float = 0,
    queued: asyncio.Event | None = None,
) -> None:
    since = time.monotonic()
    first = await started(source.stream, queued or asyncio.Event(), patience_s=ping_s)
    stream = EventStream(
        first,
        source.stream,
        request_id="r",
        abandon=abandon or asyncio.Event(),
        ping_s=ping_s,
        silent_since=since,
    )
    await stream({"type": "http", CONNECTION_KEY: border}, border.receive, border.send)


async def test_a_stream_is_its_events_and_ends_the_message() -> None:
    border, source = Border(), Source(b"a", b"b")
    await answer(source, border)
    assert border.body == b"ab" and border.sent[0]["status"] == 200
    assert border.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert border.kept == [OPENAI.cut], "what its clients read should the process die"
    assert source.closed


async def test_a_failure_before_the_first_event_raises_so_that_it_gets_a_status() -> None:
    source = Source(Unavailable("full"))
    with pytest.raises(Unavailable):
        await started(source.stream, asyncio.Event(), patience_s=0)
    assert source.closed


@pytest.mark.parametrize("begun", [(), (b"a",)])
async def test_a_silent_stream_gets_comments_between_its_events(begun: tuple[bytes, ...]) -> None:
    border, source = Border(), Source(*begun, endless=True)
    task = asyncio.create_task(answer(source, border, ping_s=0.001))
    events, ping = b"".join(begun), OPENAI.ping
    # On a busy machine comments may stand before the first event, too.
    while border.body.replace(ping, b"") != events or not border.body.endswith(3 * ping):
        await asyncio.sleep(0)
    assert border.sent[0]["status"] == 200
    border.left.set()
    with pytest.raises(ClientGone):
        await task
    assert source.closed


async def test_what_fails_after_a_comment_is_an_error_event() -> None:
    full = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await full.wait()
        raise Unavailable("full")
        yield b""

    border, source = Border(), Source()
    source.stream = events()
    task = asyncio.create_task(answer(source, border, ping_s=0.001))
    while not border.body:
        await asyncio.sleep(0)
    full.set()
    await task
    assert border.body.startswith(OPENAI.ping) and border.body.endswith(sse.DONE)
    assert b"server_overloaded" in border.body


async def test_a_failure_later_is_an_error_event_and_never_a_normal_end() -> None:
    border, source = Border(), Source(b"data: 1\n\n", EngineDead("gone"))
    await answer(source, border)
    first, error, done, rest = border.body.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_dead"


async def test_an_unknown_failure_is_told_without_its_text() -> None:
    border = Border()
    await answer(Source(b"x", ValueError("secret /etc/x 0xdeadbeef")), border)
    assert b"secret" not in border.body and b"server_error" in border.body


async def test_a_disconnect_closes_the_source() -> None:
    border, source = Border(), Source(b"a", endless=True)
    task = asyncio.create_task(answer(source, border))
    while border.body != b"a":
        await asyncio.sleep(0)
    border.left.set()
    with pytest.raises(ClientGone):
        await task
    assert source.closed


async def test_the_end_of_the_drain_is_an_error_event() -> None:
    border, source, abandon = Border(), Source(b"a", endless=True), asyncio.Event()
    abandon.set()
    await answer(source, border, abandon)
    assert source.closed and b"shutting down" in border.body and border.body.endswith(sse.DONE)


@pytest.mark.parametrize("ping_s", [0, 0.001])
async def test_a_reader_that_takes_nothing_is_dropped(
    monkeypatch: pytest.MonkeyPatch, ping_s: float
) -> None:
    """Comments do not count as taken."""
    monkeypatch.setattr(sse, "STALL_S", 0.01)
    border, source = Border(), Source(b"a", b"b")
    border.stuck = True
    with pytest.raises(SlowReader):
        await answer(source, border, ping_s=ping_s)
    assert source.closed and border.left.is_set(), "the connection was aborted"


async def test_work_that_is_done_wins_over_a_disconnect_at_the_same_moment() -> None:
    border = Border()
    border.left.set()

    async def work() -> int:
        return 5

    assert await until_gone(border.receive, work(), abandon=asyncio.Event()) == 5


async def test_the_work_is_cancelled_in_the_turn_that_learns_of_the_disconnect() -> None:
    """Defect: tokens were computed for clients that had left; each turn of a busy loop is some."""
    border, source = Border(), Source(b"a", endless=True)
    task = asyncio.create_task(answer(source, border))
    while border.body != b"a":
        await asyncio.sleep(0)
    border.left.set()
    turns = 0
    while not source.closed:
        turns += 1
        await asyncio.sleep(0)
    assert turns == 2, "the watch learns of it and cancels, then the work unwinds"
    with pytest.raises(ClientGone):
        await task


async def test_work_that_fails_as_it_is_cancelled_is_still_a_client_that_left() -> None:
    border = Border()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cleaning up failed")

    asyncio.get_running_loop().call_soon(border.left.set)
    with pytest.raises(ClientGone):
        await until_gone(border.receive, work(), abandon=asyncio.Event())


class Document:
    """What a body was read into."""


async def test_what_failed_work_held_goes_with_it_and_waits_for_no_collector() -> None:
    """Defect: the watcher of the client knew the work, this its error, and this the frame that knew the watcher."""
    border = Border()
    document = Document()
    held = weakref.ref(document)

    async def work(document: Document) -> None:
        await asyncio.sleep(0)
        raise ValueError(document)

    gc.disable()
    try:
        try:
            await until_gone(border.receive, work(document), abandon=asyncio.Event())
        except ValueError:
            del document
        await asyncio.sleep(0)
        assert held() is None
    finally:
        gc.enable()
