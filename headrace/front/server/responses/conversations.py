"""Conversations of the Responses dialect: items under an id, which responses read and add to.

A conversation is kept in the store of responses, under its bounds, its owner and its expiry: as one
record whose `response` is the conversation itself and whose `input` are its items, oldest first. It
holds no more than a body may."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import ContextTooLong, InvalidRequest, NotFound
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.http.auth import CONVERSATION_PREFIX, conversation_id, response_id
from headrace.front.server.http.limits import typed
from headrace.front.server.http.paging import page_of
from headrace.front.server.responses.items import ItemMessages, with_ids
from headrace.front.server.responses.schema import (
    MAX_ITEMS,
    ConversationRequest,
    ItemsRequest,
    Json,
    MetadataRequest,
)
from headrace.front.server.responses.tools import offered
from headrace.front.server.state.responses import Record, ResponseStore


async def post_conversations(context: RequestContext, document: Any) -> Response:
    """POST /v1/conversations: a new one."""
    request = typed(document, ConversationRequest)
    store = _store(context)
    items = _checked(request.items or [])
    conversation = {
        "id": conversation_id(),
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": request.metadata or {},
    }
    await store.put(
        Record(
            id=str(conversation["id"]),
            owner=context.tenant,
            previous=None,
            response=orjson.dumps(conversation),
            input=orjson.dumps(items),
        )
    )
    return json_response(conversation)


async def get_conversation(context: RequestContext, request: Request) -> Response:
    """GET /v1/conversations/{id}."""
    record = await kept(context, request.path_params["id"])
    return json_response(orjson.loads(record.response))


async def post_metadata(context: RequestContext, request: Request, document: Any) -> Response:
    """POST /v1/conversations/{id}: other metadata."""
    body = typed(document, MetadataRequest)

    def change(record: Record) -> Record:
        conversation = {**orjson.loads(record.response), "metadata": body.metadata or {}}
        return msgspec.structs.replace(record, response=orjson.dumps(conversation))

    record = await _changed(context, request.path_params["id"], change)
    return json_response(orjson.loads(record.response))


async def delete_conversation(context: RequestContext, request: Request) -> Response:
    """DELETE /v1/conversations/{id}."""
    ident = request.path_params["id"]
    if not ident.startswith(CONVERSATION_PREFIX) or not await _store(context).delete(
        ident, context.tenant
    ):
        raise _unknown(ident)
    return json_response({"id": ident, "object": "conversation.deleted", "deleted": True})


async def post_items(context: RequestContext, request: Request, document: Any) -> Response:
    """POST /v1/conversations/{id}/items: adds some at the end."""
    items = _checked(typed(document, ItemsRequest).items)
    most = context.services.server.max_body_bytes
    await add(context, request.path_params["id"], items, most_bytes=most)
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


async def get_items(context: RequestContext, request: Request) -> Response:
    """GET /v1/conversations/{id}/items."""
    record = await kept(context, request.path_params["id"])
    return json_response(page_of(request, items_of(record)))


async def get_item(context: RequestContext, request: Request) -> Response:
    """GET /v1/conversations/{id}/items/{item}."""
    record = await kept(context, request.path_params["id"])
    ident = request.path_params["item"]
    return json_response(_item(items_of(record), ident))


async def delete_item(context: RequestContext, request: Request) -> Response:
    """DELETE /v1/conversations/{id}/items/{item}: answers with the conversation."""
    ident = request.path_params["item"]

    def change(record: Record) -> Record:
        items = items_of(record)
        items.remove(_item(items, ident))
        return msgspec.structs.replace(record, input=orjson.dumps(items))

    record = await _changed(context, request.path_params["id"], change)
    return json_response(orjson.loads(record.response))


async def kept(context: RequestContext, ident: str) -> Record:
    """The conversation with this id; NotFound if this key has none."""
    record = None
    if ident.startswith(CONVERSATION_PREFIX):
        record = await _store(context).get(ident, context.tenant)
    if record is None:
        raise _unknown(ident)
    return record


async def history_of(context: RequestContext, ident: str) -> list[Json]:
    """What was said before; ContextTooLong if that is more than a request may bring."""
    record = await kept(context, ident)
    most = context.services.server.max_body_bytes
    if len(record.input) > most:
        raise ContextTooLong(
            f"conversation: it has more than {most} bytes; delete items of it, or begin "
            "another one",
            field="conversation",
        )
    return items_of(record)


def items_of(record: Record) -> list[Json]:
    """The items of a conversation, oldest first."""
    items: list[Json] = orjson.loads(record.input)
    return items


async def add(
    context: RequestContext, ident: str, items: Sequence[Json], *, most_bytes: int | None = None
) -> None:
    """Adds items at the end, up to the bounds where there are any: what a response said is added
    beyond them too."""

    def change(record: Record) -> Record:
        before = items_of(record)
        known = {item["id"] for item in before}
        twice = next((item["id"] for item in items if item["id"] in known), None)
        if most_bytes is not None and twice is not None:
            raise InvalidRequest(f"items: {twice!r:.80} is in it already", field="items")
        stored = orjson.dumps([*before, *items])
        if most_bytes is not None and (
            len(stored) > most_bytes or len(before) + len(items) > MAX_ITEMS
        ):
            raise InvalidRequest(
                f"items: the conversation would hold {len(before) + len(items)} items of "
                f"{len(stored)} bytes; at most "
                f"{MAX_ITEMS} of {most_bytes} bytes are kept; begin another one",
                field="items",
            )
        return msgspec.structs.replace(record, input=stored)

    await _changed(context, ident, change)


async def _changed(
    context: RequestContext, ident: str, change: Callable[[Record], Record]
) -> Record:
    record = None
    if ident.startswith(CONVERSATION_PREFIX):
        record = await _store(context).change(ident, context.tenant, change)
    if record is None:
        raise _unknown(ident)
    return record


def _checked(sent_items: list[Json]) -> list[Json]:
    """Items as they are kept; one that no conversation could be continued with is refused."""
    items = with_ids(sent_items, response_id())
    if len({item["id"] for item in items}) < len(items):
        raise InvalidRequest("items: two have the same id", field="items")
    folded = ItemMessages(offered(None), lambda sealed: "")
    for i, item in enumerate(items):
        folded.take(item, f"items[{i}]")
    return items


def _item(items: list[Json], ident: str) -> Json:
    named_item = next((item for item in items if item["id"] == ident), None)
    if named_item is None:
        raise NotFound(f"item {ident!r:.80} is not in this conversation", field="item_id")
    return named_item


def _store(context: RequestContext) -> ResponseStore:
    store = context.services.store
    if store is None:
        raise InvalidRequest("conversation: this server keeps none", field="conversation")
    return store


def _unknown(ident: str) -> NotFound:
    return NotFound(f"conversation {ident!r:.80} is not there (any more)", field="conversation")
