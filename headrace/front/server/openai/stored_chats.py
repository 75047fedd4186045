"""Chats that are kept (`store: true`): listed, read, given metadata, deleted, with their messages.

A chat belongs to the key that made it. How it comes there: keep_chat.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequest, NotFound
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import Metadata
from headrace.front.server.http.limits import typed
from headrace.front.server.http.paging import MAX_LISTED, number_of, page_of
from headrace.front.server.openai.keep_chat import PREFIX, store_of
from headrace.front.server.state.responses import Record

Json = dict[str, Any]
_METADATA = re.compile(r"metadata\[([^\]]{1,64})\]")


class ChatMetadataRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions/{id}."""

    metadata: Metadata | None


async def get_chats(context: RequestContext, request: Request) -> Response:
    """The stored chats, by `model` and `metadata[key]=value`, in pages (`order`, `limit`,
    `after`)."""
    query = request.query_params
    order = query.get("order", "asc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: {order[:50]!r} given; allowed: asc, desc", field="order")
    limit = number_of(request, "limit", default=20, least=1, most=MAX_LISTED)
    fields = {m[1]: value for name, value in query.items() if (m := _METADATA.fullmatch(name))}
    wanted = _Wanted(model=query.get("model"), metadata=fields)
    documents = await store_of(context).chats.page(
        context.tenant,
        oldest_first=order == "asc",
        after=query.get("after"),
        count=limit + 1,
        wanted=wanted.holds,
    )
    if documents is None:
        raise InvalidRequest(f"after: no chat {query['after'][:80]!r} here", field="after")
    data = [orjson.loads(document) for document in documents[:limit]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    more = len(documents) > limit
    page = {"object": "list", "data": data, "first_id": "", "last_id": "", **ends}
    return json_response({**page, "has_more": more})


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What listed chats must have."""

    model: str | None
    metadata: Mapping[str, str]

    def holds(self, document: bytes) -> bool:
        """Whether a stored chat is one of them."""
        if self.model is None and not self.metadata:
            return True
        chat = orjson.loads(document)
        if self.model not in (None, chat["model"]):
            return False
        return all(chat["metadata"].get(key) == value for key, value in self.metadata.items())


async def _record(context: RequestContext, request: Request) -> Record:
    ident = request.path_params["id"]
    store = context.services.store
    is_chat = store is not None and ident.startswith(PREFIX)
    record = await store.get(ident, context.tenant) if store is not None and is_chat else None
    if record is None:
        raise _absent(ident)
    return record


def _absent(ident: str) -> NotFound:
    return NotFound(f"chat {ident!r:.80} is not there (any more)", field="completion_id")


async def get_chat(context: RequestContext, request: Request) -> Response:
    """A stored chat."""
    return json_response(orjson.loads((await _record(context, request)).response))


async def post_metadata(context: RequestContext, request: Request, document: Any) -> Response:
    """Gives a stored chat other metadata."""
    asked = typed(document, ChatMetadataRequest)
    ident = request.path_params["id"]

    def changed(record: Record) -> Record:
        chat = {**orjson.loads(record.response), "metadata": asked.metadata or {}}
        return msgspec.structs.replace(record, response=orjson.dumps(chat))

    record = None
    if ident.startswith(PREFIX) and context.services.store is not None:
        record = await context.services.store.change(ident, context.tenant, changed)
    if record is None:
        raise _absent(ident)
    return json_response(orjson.loads(record.response))


async def delete_chat(context: RequestContext, request: Request) -> Response:
    """Forgets a stored chat."""
    ident = request.path_params["id"]
    store = context.services.store if ident.startswith(PREFIX) else None
    if store is None or not await store.delete(ident, context.tenant):
        raise _absent(ident)
    return json_response({"object": "chat.completion.deleted", "id": ident, "deleted": True})


async def get_messages(context: RequestContext, request: Request) -> Response:
    """The messages that a stored chat was asked with, in pages."""
    record = await _record(context, request)
    messages: list[Json] = orjson.loads(record.input)
    items = [_message(one, f"{record.id}-{i}") for i, one in enumerate(messages)]
    return json_response(page_of(request, items, order="asc"))


def _message(message: Json, ident: str) -> Json:
    content = message.get("content")
    shown: Json = {"content_parts": None}
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        joined = "\n".join(text for text in texts if isinstance(text, str))
        shown = {"content": joined or None, "content_parts": content}
    return {"content": None, "refusal": None, **message, **shown, "id": ident}
