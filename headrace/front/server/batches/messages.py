"""/v1/messages/batches: the same batches as Anthropic's clients make and read them.

A batch of messages is a file of lines and a batch over it, both kept as those of /v1/batches are
and answered by the same runner; ids differ in their beginning alone. Its results are told line by
line once it has ended, in no order; what has no answer then was cancelled or has expired."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.base.errors import Conflict, InvalidRequest, NotFound, RateLimited
from headrace.front.server.batches.lines import MAX_LINES
from headrace.front.server.batches.routes import WINDOW_S, stores_of
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.paging import page_of_ids
from headrace.front.server.state.batches import OVER, Counts, StoredBatch, new_batch_id
from headrace.front.server.state.files import FileStore

_ROUTE = "/v1/messages"
_OURS, _THEIRS = "batch_", "msgbatch_"
_LINES_AT_ONCE = 64


class MessageBatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch: `params` is the body of POST /v1/messages."""

    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/batches."""

    requests: Annotated[list[MessageBatchEntry], Meta(min_length=1, max_length=MAX_LINES)]


async def post_batch(context: RequestContext, document: Any) -> Response:
    """A batch of messages, answered in the background."""
    files, batches = stores_of(context)
    request = parse(document, MessageBatchRequest)
    seen: set[str] = set()
    for number, entry in enumerate(request.requests):
        if entry.custom_id in seen:
            field = f"requests[{number}].custom_id"
            raise InvalidRequest(f"{field}: {entry.custom_id!r} occurs twice", field=field)
        seen.add(entry.custom_id)
    if not await asyncio.to_thread(batches.forget_old, context.tenant):
        raise RateLimited("this key has too many unfinished batches", retry_after_s=60.0)
    written = await asyncio.to_thread(_stored, files, context.tenant, request)
    batch = StoredBatch(
        id=new_batch_id(),
        owner=context.tenant,
        endpoint=_ROUTE,
        input_file_id=written,
        completion_window="24h",
        created_at=int(time.time()),
        expires_at=int(time.time()) + WINDOW_S,
    ).now("in_progress", counts=Counts(total=len(request.requests)))
    batches.put(batch)
    return json_response(_shown(batch, asked_cancel=False))


def _stored(files: FileStore, owner: str, request: MessageBatchRequest) -> str:
    """Writes the requests down as the lines of a file; its id."""
    upload = files.upload(owner)
    try:
        for entry in request.requests:
            line = {"custom_id": entry.custom_id, "method": "POST", "url": _ROUTE}
            upload.write(orjson.dumps({**line, "body": entry.params}) + b"\n")
        return upload.finish(filename="requests.jsonl", purpose="batch", expires_s=None).id
    except BaseException:
        upload.cancel()
        raise


async def get_batches(context: RequestContext, request: Request) -> Response:
    """The key's batches of messages, newest first, in pages: `limit`, `after_id`, `before_id`."""
    _, batches = stores_of(context)
    every = await asyncio.to_thread(batches.of_owner, context.tenant)
    mine = {_THEIRS + one.id.removeprefix(_OURS): one for one in every if one.endpoint == _ROUTE}
    page, has_more = page_of_ids(request, list(mine), of="batch")
    return json_response(
        {
            "data": [_shown(mine[ident], batches.asked_cancel(mine[ident])) for ident in page],
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    )


async def get_batch(context: RequestContext, request: Request) -> Response:
    """How far a batch of messages is."""
    _, batches = stores_of(context)
    batch = _named(context, request)
    return json_response(_shown(batch, batches.asked_cancel(batch)))


async def post_cancel(context: RequestContext, request: Request) -> Response:
    """Ends a batch of messages; answers so far are kept."""
    _, batches = stores_of(context)
    batch = _named(context, request)
    if batch.status not in OVER:
        batches.ask_cancel(batch)
        batch = _named(context, request)
    return json_response(_shown(batch, batches.asked_cancel(batch)))


async def delete_batch(context: RequestContext, request: Request) -> Response:
    """Forgets a batch of messages that has ended, with its requests and results."""
    files, batches = stores_of(context)
    batch = _named(context, request)
    if batch.status not in OVER:
        raise Conflict("this batch has not ended; cancel it first")
    for ident in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if ident is not None and files.has(ident):
            files.delete(files.get(ident, batch.owner))
    batches.delete(batch)
    return json_response({"id": _ident(batch), "type": "message_batch_deleted"})


async def get_results(context: RequestContext, request: Request) -> Response:
    """What became of each request of a batch of messages, as JSON lines."""
    files, _ = stores_of(context)
    batch = _named(context, request)
    if batch.status not in OVER:
        raise NotFound("this batch has no results yet: it has not ended", field="id")
    return StreamingResponse(
        _pieces(_results(files, batch)),
        media_type="application/x-jsonl",
        headers={"x-content-type-options": "nosniff"},
    )


async def _pieces(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(_some, lines):
        yield piece


def _some(lines: Iterator[bytes]) -> bytes:
    return b"".join(line for _, line in zip(range(_LINES_AT_ONCE), lines, strict=False))


def _results(files: FileStore, batch: StoredBatch) -> Iterator[bytes]:
    """A line for each request."""
    answered: set[str] = set()
    for ident, kind, name in (
        (batch.output_file_id, "succeeded", "message"),
        (batch.error_file_id, "errored", "error"),
    ):
        for line in _lines_of(files, batch, ident):
            answered.add(line["custom_id"])
            result = {"type": kind, name: line["response"]["body"]}
            yield _result(line["custom_id"], result)
    kind = _UNANSWERED.get(batch.status, "expired")
    for line in _lines_of(files, batch, batch.input_file_id):
        if line["custom_id"] not in answered:
            yield _result(line["custom_id"], {"type": kind})


def _lines_of(files: FileStore, batch: StoredBatch, ident: str | None) -> Iterator[dict[str, Any]]:
    if ident is not None and files.has(ident):
        with files.open(files.get(ident, batch.owner)) as file:
            for line in file:
                yield orjson.loads(line)


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "result": result}) + b"\n"


_UNANSWERED = {"cancelled": "canceled", "expired": "expired"}


def _named(context: RequestContext, request: Request) -> StoredBatch:
    _, batches = stores_of(context)
    ident = request.path_params["id"]
    known = ident.startswith(_THEIRS)
    batch = batches.get(_OURS + ident.removeprefix(_THEIRS), context.tenant) if known else None
    if batch is None or batch.endpoint != _ROUTE:
        raise NotFound(f"no batch with the id {ident[:80]!r}", field="id")
    return batch


def _ident(batch: StoredBatch) -> str:
    return _THEIRS + batch.id.removeprefix(_OURS)


def _shown(batch: StoredBatch, asked_cancel: bool) -> dict[str, Any]:
    """The batch as Anthropic's clients know it. `results_url` is below the server's address."""
    counts, over = batch.counts, batch.status in OVER
    rest = max(0, counts.total - counts.completed - counts.failed)
    unanswered = _UNANSWERED.get(batch.status, "expired") if over else "processing"
    kinds = dict.fromkeys(("processing", "canceled", "expired"), 0) | {unanswered: rest}
    cancelling = batch.status == "cancelling" or asked_cancel
    ended = max((batch.times.get(f"{one}_at", 0) for one in OVER), default=0)
    stopped = batch.times.get("cancelling_at") or (ended if batch.status == "cancelled" else 0)
    if cancelling and not over:
        stopped = stopped or int(time.time())
    return {
        "id": _ident(batch),
        "type": "message_batch",
        "processing_status": "ended" if over else ("canceling" if cancelling else "in_progress"),
        "request_counts": {"succeeded": counts.completed, "errored": counts.failed, **kinds},
        "created_at": _rfc3339(batch.created_at),
        "expires_at": _rfc3339(batch.expires_at),
        "ended_at": _rfc3339(ended) if over else None,
        "cancel_initiated_at": _rfc3339(stopped) if stopped else None,
        "archived_at": None,
        "results_url": f"{_ROUTE}/batches/{_ident(batch)}/results" if over else None,
    }


def _rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
