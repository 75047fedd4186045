"""Server-sent events over pre-encoded bytes, and the watch that ends the work when its client
leaves.

`until_gone` runs the work of a request beside a watch on the connection: whichever ends first ends
the other, so that a disconnect aborts in every phase, also without streaming. `EventStream` writes
one event per chunk and never more than the socket takes: a reader that takes nothing for `stall_s`
is dropped (1.7). A failure after the first byte becomes an error event followed by the end mark; it
never looks like a normal end.

When the status goes out: with the first event, so that what fails before it is answered with its
own status; or before, once the engine has queued the request: nothing of what a client does wrong
is found after that, and with its id at hand the client can ask why it waits. A request that waits
longer than `ping_s` gets 200 then, and a comment, and another one after each silence of `ping_s`,
so that no proxy on the way gives up on it (nginx and ALB do after 60 s)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.base.errors import Unavailable
from headrace.front.server.http.failures import ID_PLACE, OPENAI, ErrorFormat, failure_of

T = TypeVar("T")


Chunks = AsyncGenerator[bytes, None]
"""Events of an answer, encoded."""


DONE = b"data: [DONE]\n\n"


STALL_S = 60.0


CONNECTION_KEY = "headrace.connection"
"""Key of the scope under which its `ClientConnection` stands."""


class ClientConnection:
    """What a request may ask of the connection that it came by. This one does nothing: it stands in
    where there is no other (tests)."""

    def abort(self) -> None:
        """Closes it without waiting for the reader."""

    def keep_place(self) -> None:
        """A request on it has shown a key."""

    def keep_stream(self, last_events: bytes) -> None:
        """The stream that has begun ends with these events if the process dies."""


NO_CONNECTION = ClientConnection()


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


class SlowReader(ClientGone):
    """The client took nothing for too long and was dropped."""


async def until_gone(
    receive: Receive, work: Coroutine[Any, Any, T], *, abandon: asyncio.Event
) -> T:
    """Runs `work` to its end; raises ClientGone on disconnect, Unavailable once `abandon` is set
    (end of drain)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_cancel_when_gone(receive, task))
    over = asyncio.ensure_future(abandon.wait())
    try:
        await asyncio.wait({task, gone, over}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and gone.result():
            raise ClientGone
        if task.done():
            return task.result()
        raise Unavailable("the server is shutting down; the request was ended", retry_after_s=5.0)
    finally:
        await _ended(task, gone, over)
        # What was raised knows this frame, and the tasks know it: a circle, which would keep the
        # request's body until the garbage collector comes by.
        del task, gone, over


async def _cancel_when_gone(receive: Receive, work: asyncio.Future[Any]) -> bool:
    """Cancels the work in the turn of the event loop that learns of the disconnect; False if it was
    done before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return work.cancel()


@dataclass(eq=False)
class EventStream(Response):
    """A streaming answer: whole encoded events, of which `first` (see `started`) may still be on
    its way. `silent_since`: when its client heard last, at first when its request arrived."""

    media_type = "text/event-stream"
    status_code = 200
    background = None

    first: asyncio.Future[bytes]
    rest: Chunks
    request_id: str = field(kw_only=True)
    abandon: asyncio.Event = field(kw_only=True)
    ping_s: float = field(kw_only=True)
    silent_since: float = field(kw_only=True)
    shape: ErrorFormat = field(kw_only=True, default=OPENAI)
    last_comment: Callable[[], bytes] | None = field(kw_only=True, default=None)
    raw_headers: list[tuple[bytes, bytes]] = field(init=False, default_factory=_HEADERS.copy)
    _writing: bool = field(init=False, default=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; every way it can end closes the generator, which aborts what still
        runs."""
        connection: ClientConnection = scope.get(CONNECTION_KEY, NO_CONNECTION)
        watch = asyncio.ensure_future(self._watch(connection))
        tasks: list[asyncio.Future[Any]] = [watch, self.first]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection.keep_stream(self.shape.cut.replace(ID_PLACE, self.request_id.encode()))
            pings = asyncio.ensure_future(self._ping(send))
            tasks.append(pings)
            try:
                await until_gone(receive, self._pump(send), abandon=self.abandon)
            except ClientGone:
                raise SlowReader if watch.done() else ClientGone from None
            except Exception as error:
                failure = failure_of(error, request_id=self.request_id)
                await self._write(send, self.shape.last_words(failure, self.request_id))
            await _ended(pings)
            if self.last_comment is not None and (said := self.last_comment()):
                await self._write(send, said)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _ended(*tasks)
            await self.rest.aclose()

    async def _pump(self, send: Send) -> None:
        await self._write(send, await self.first)
        async for event in self.rest:
            await self._write(send, event)

    async def _write(self, send: Send, data: bytes) -> None:
        """Sends once the socket has room; the server holds no more than its own write buffer (64
        KiB) for a slow reader."""
        self.silent_since, self._writing = time.monotonic(), True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False

    async def _ping(self, send: Send) -> None:
        """A comment after each silence. Events are written whole, so that it can only stand between
        two of them."""
        while self.ping_s > 0:
            due_s = self.silent_since + self.ping_s - time.monotonic()
            if due_s > 0 or self._writing:
                await asyncio.sleep(due_s if due_s > 0 else self.ping_s)
            else:
                await self._write(send, self.shape.ping)

    async def _watch(self, connection: ClientConnection) -> None:
        """Ends the connection once a write has waited for its reader for `STALL_S`. It looks at
        times: a clock for each write would cost as much as the write."""
        waited_s = 0.0
        while waited_s < STALL_S:
            await asyncio.sleep(STALL_S - waited_s)
            waited_s = time.monotonic() - self.silent_since if self._writing else 0.0
        connection.abort()


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def started(
    events: Chunks, queued: asyncio.Event, *, patience_s: float
) -> asyncio.Future[bytes]:
    """The first event, waited for until `queued` is set, and for `patience_s` at most (0: as long
    as it takes): what fails until then gets its own status."""
    first: asyncio.Future[bytes] = asyncio.ensure_future(anext(events))
    waits: asyncio.Future[Any] = asyncio.ensure_future(queued.wait())
    try:
        await asyncio.wait(
            {first, waits}, timeout=patience_s or None, return_when=asyncio.FIRST_COMPLETED
        )
        if first.done():
            first.result()
        return first
    except BaseException:
        await _ended(first)
        await events.aclose()
        del first  # a circle, see until_gone
        raise
    finally:
        waits.cancel()


STEP_BYTES = 64


_END = b"}\n\n"


def padding(size: int) -> str:
    """Characters without meaning that fill `size` bytes up to a multiple of the step, and a step
    more."""
    return secrets.token_hex(STEP_BYTES)[: 2 * STEP_BYTES - size % STEP_BYTES]


async def padded(chunks: Chunks) -> Chunks:
    """The chunks with `obfuscation`; the end mark stays as it is."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk != DONE:
                head = chunk.removesuffix(_END)
                chunk = head + b',"obfuscation":"' + padding(len(chunk)).encode() + b'"' + _END
            yield chunk
