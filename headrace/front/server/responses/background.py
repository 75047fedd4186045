"""Responses that go on after their request was answered, and following them.

The process that makes one writes its events to the store a few times a second and learns there
whether somebody wants it to stop; whoever follows reads them there. So it does not matter which API
process a client reaches."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.base.errors import NotFound, Unavailable
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.auth import RESPONSE_PREFIX
from headrace.front.server.http.failures import OPENAI, failure_of
from headrace.front.server.http.sse import Chunks
from headrace.front.server.responses.run import Prepared, run, store
from headrace.front.server.responses.schema import Json
from headrace.front.server.responses.stream import encoded
from headrace.front.server.state.responses import Record, ResponseStore

FLUSH_S = 0.1
HEARTBEAT_S = 1.0
STATUS = {"completed": 200, "incomplete": 200, "cancelled": 499}
"""What a trace tells of a response by its status; the others failed."""


async def start(prepared: Prepared) -> None:
    """Stores the response as queued and lets it run. It holds a place of its key until it is
    over."""
    services = prepared.context.services
    first = prepared.context
    prepared.context = RequestContext(
        services=services,
        request_id=first.request_id,
        tenant=first.tenant,
        timeout_s=first.timeout_s,
    )
    if first.model_use is not None:
        first.model_use.again(prepared.context)
    await store(prepared, running=True)
    prepared.context.trace, first.trace = first.trace, None  # it ends with the response
    task = asyncio.ensure_future(_make(prepared))
    services.background.add(task)
    task.add_done_callback(services.background.discard)


async def _make(prepared: Prepared) -> None:
    services = prepared.context.services
    kept = services.store
    assert kept is not None, "what runs in the background is stored"
    pending: list[tuple[int, bytes]] = []
    pump = asyncio.ensure_future(_pump(prepared, pending))
    over = asyncio.ensure_future(services.abandon.wait())
    try:
        wanted = await _flush_until_done(kept, prepared, pump, over, pending)
        if wanted and not pump.done():
            leaving = Unavailable("the server was shut down", retry_after_s=1.0)
            _note(pending, prepared.stream.fail(failure_of(leaving, request_id=prepared.reply.id)))
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        if prepared.stream.response["status"] in ("queued", "in_progress"):
            _note(pending, prepared.stream.cancel())
        if await kept.heartbeat(prepared.reply.id, pending, last=True):  # or it was deleted
            await store(prepared)
    finally:
        prepared.context.held.close()
        over.cancel()
        pump.cancel()
        prepared.context.over(STATUS.get(prepared.stream.response["status"], 500))


async def _flush_until_done(
    kept: ResponseStore,
    prepared: Prepared,
    pump: asyncio.Future[None],
    over: asyncio.Future[Any],
    pending: list[tuple[int, bytes]],
) -> bool:
    """Writes events as they come; False if the response was cancelled or deleted."""
    last_heartbeat = 0.0
    due = False
    while True:
        await asyncio.wait({pump, over}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        if pump.done() or over.done():
            return True
        if pending or time.monotonic() - last_heartbeat > HEARTBEAT_S:
            events = pending[:]
            last_heartbeat = time.monotonic()
            if not await kept.heartbeat(prepared.reply.id, events):
                return False
            del pending[: len(events)]
        if not due and prepared.stream.response["status"] == "in_progress":
            due = True
            await store(prepared, running=True)


async def _pump(prepared: Prepared, pending: list[tuple[int, bytes]]) -> None:
    """Runs the generation; a failure becomes the response's last event."""
    _note(pending, prepared.stream.begin())
    try:
        async with aclosing(run(prepared, keep=False)) as events:
            async for event in events:
                _note(pending, [event])
    except Exception as error:
        _note(pending, prepared.stream.fail(failure_of(error, request_id=prepared.reply.id)))


def _note(pending: list[tuple[int, bytes]], events: list[Json]) -> None:
    pending += [(event["sequence_number"], encoded(event)) for event in events]


@dataclass
class StreamFollower:
    """Follows a response in the background; `after` is the number of the last event that was
    told."""

    context: RequestContext
    ident: str
    after: int

    async def events(self) -> Chunks:
        """The events from the one after `after` on, to its end; a comment where there are none."""
        due = False
        while True:
            record = await current(self.context, self.ident)
            kept = self.context.services.store
            assert kept is not None
            while events := await kept.events(self.ident, after=self.after):
                for number, event in events:
                    self.after, due = number, True
                    yield event
            if not record.running:
                break
            await asyncio.sleep(FLUSH_S)
        if not due:
            yield OPENAI.ping


async def current(context: RequestContext, ident: str) -> Record:
    """The stored response; one whose process died is told, and stored, as failed."""
    kept = context.services.store
    record = None
    if kept is not None and ident.startswith(RESPONSE_PREFIX):
        record = await kept.get(ident, context.tenant)
    if kept is None or record is None:
        raise NotFound(f"response {ident!r:.80} is not there (any more)", field="response_id")
    if not record.lost:
        return record
    response = orjson.loads(record.response)
    error = {"code": "server_error", "message": "the server was restarted meanwhile"}
    response |= {"status": "failed", "error": error}
    number = await kept.num_events(ident)
    kinds = ["response.failed"] if number else ["response.created", "response.failed"]
    events = [
        {"type": kind, "sequence_number": i, "response": response}
        for i, kind in enumerate(kinds, number)
    ]
    rows = [(i, encoded(event)) for i, event in enumerate(events, number)]
    await kept.heartbeat(ident, rows, last=True)
    failed = Record(
        id=record.id,
        owner=record.owner,
        previous=record.previous,
        response=orjson.dumps(response),
        input=record.input,
    )
    await kept.put(failed)
    return failed


async def cancel(context: RequestContext, ident: str) -> Record:
    """Ends a response in the background; once it has ended, as it then is. One that is over stays
    as it is."""
    record = await current(context, ident)
    kept = context.services.store
    assert kept is not None
    while record.running:
        await kept.cancel(ident, context.tenant)
        await asyncio.sleep(FLUSH_S)
        record = await current(context, ident)
    return record
