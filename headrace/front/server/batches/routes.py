"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.base.errors import Conflict, InvalidRequest, NotServed, RateLimited
from headrace.front.server.batches.lines import ENDPOINTS
from headrace.front.server.batches.upload import receive_file
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.limits import Name
from headrace.front.server.http.paging import number_of
from headrace.front.server.state.batches import OVER, BatchStore, StoredBatch, new_batch_id
from headrace.front.server.state.files import FileInfo, FileStore

_CHUNK = 1 << 16
_MAX_PAGE = 10_000
WINDOW_S = 86_400
T = TypeVar("T", FileInfo, StoredBatch)


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"]
    metadata: (
        Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
    ) = None


def stores_of(context: RequestContext) -> tuple[FileStore, BatchStore]:
    """Where files and batches are kept; NotServed where that is off."""
    stores = context.services.stores
    if stores is None:
        raise NotServed("files and batches are off on this server; see --file-store")
    return stores


async def post_file(context: RequestContext, request: Request) -> Response:
    """POST /v1/files."""
    files, _ = stores_of(context)
    idle_s = context.services.server.body_timeout_s
    return json_response(_shown(await receive_file(request, files, context.tenant, idle_s=idle_s)))


async def get_files(context: RequestContext, request: Request) -> Response:
    """GET /v1/files: newest first; purpose, limit, after, order."""
    files, _ = stores_of(context)
    infos = await asyncio.to_thread(files.of_owner, context.tenant)
    purpose = request.query_params.get("purpose")
    if purpose is not None:
        infos = [info for info in infos if info.purpose == purpose]
    if request.query_params.get("order", "desc") == "asc":
        infos.reverse()
    page, more = _page(request, infos)
    return _listed([_shown(info) for info in page], more)


async def get_file(context: RequestContext, request: Request) -> Response:
    """GET /v1/files/{id}."""
    files, _ = stores_of(context)
    return json_response(_shown(files.get(request.path_params["id"], context.tenant)))


async def delete_file(context: RequestContext, request: Request) -> Response:
    """DELETE /v1/files/{id}; one that a running batch reads stays until it is over."""
    files, batches = stores_of(context)
    info = files.get(request.path_params["id"], context.tenant)
    for batch in await asyncio.to_thread(batches.of_owner, context.tenant):
        if batch.input_file_id == info.id and batch.status not in OVER:
            raise Conflict(f"{info.id} is read by {batch.id}, which is {batch.status}")
    files.delete(info)
    return json_response({"id": info.id, "object": "file", "deleted": True})


async def get_content(context: RequestContext, request: Request) -> Response:
    """GET /v1/files/{id}/content."""
    files, _ = stores_of(context)
    info = files.get(request.path_params["id"], context.tenant)
    return StreamingResponse(
        _pieces(files.open(info)),
        media_type="application/octet-stream",
        headers={"content-length": str(info.bytes), "x-content-type-options": "nosniff"},
    )


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece


async def post_batch(context: RequestContext, document: Any) -> Response:
    """POST /v1/batches."""
    files, batches = stores_of(context)
    request = parse(document, BatchRequest)
    if request.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"endpoint: {request.endpoint[:80]!r} given; allowed: {', '.join(ENDPOINTS)}",
            field="endpoint",
        )
    info = files.get(request.input_file_id, context.tenant)
    if info.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id: its purpose is {info.purpose!r}; 'batch' is needed",
            field="input_file_id",
        )
    if not await asyncio.to_thread(batches.forget_old, context.tenant):
        raise RateLimited("this key has too many unfinished batches", retry_after_s=60.0)
    now = int(time.time())
    batch = StoredBatch(
        id=new_batch_id(),
        owner=context.tenant,
        endpoint=request.endpoint,
        input_file_id=info.id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=request.metadata,
    )
    batches.put(batch)
    return json_response(batch.shown())


async def get_batches(context: RequestContext, request: Request) -> Response:
    """GET /v1/batches: newest first; limit, after."""
    _, batches = stores_of(context)
    page, more = _page(
        request, await asyncio.to_thread(batches.of_owner, context.tenant), default=20
    )
    return _listed([batch.shown() for batch in page], more)


async def get_batch(context: RequestContext, request: Request) -> Response:
    """GET /v1/batches/{id}."""
    _, batches = stores_of(context)
    batch = batches.get(request.path_params["id"], context.tenant)
    paused = {"paused": batches.paused} if batches.paused and batch.status not in OVER else {}
    return json_response({**batch.shown(), **paused})


async def post_cancel(context: RequestContext, request: Request) -> Response:
    """POST /v1/batches/{id}/cancel: what runs ends, answers so far are kept."""
    _, batches = stores_of(context)
    batch = batches.get(request.path_params["id"], context.tenant)
    if batch.status in OVER:
        raise Conflict(f"{batch.id} is {batch.status} already")
    batches.ask_cancel(batch)
    return json_response(batches.get(batch.id, context.tenant).shown())


def _shown(info: FileInfo) -> dict[str, Any]:
    expires = {} if info.expires_at is None else {"expires_at": info.expires_at}
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.bytes,
        "created_at": info.created_at,
        **expires,
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
    }


def _page(
    request: Request, entries: Sequence[T], *, default: int = _MAX_PAGE
) -> tuple[list[T], bool]:
    """The asked part of a list, and whether there is more behind it."""
    limit = number_of(request, "limit", default=default, least=1, most=_MAX_PAGE)
    start = 0
    after = request.query_params.get("after")
    if after is not None:
        start = next((i + 1 for i, item in enumerate(entries) if item.id == after), len(entries))
    end = start + limit
    return list(entries[start:end]), len(entries) > end


def _listed(data: list[dict[str, Any]], more: bool) -> Response:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return json_response(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
    )
