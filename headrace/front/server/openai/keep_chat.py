"""A chat with `store: true` on its way into the store: whole or streamed, before its end is
told."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Ended, Event, Events
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.state.responses import Record, ResponseStore

if TYPE_CHECKING:
    from headrace.front.server.openai.chat import ChatReply

    FoldChat = Callable[[Events, ChatReply], Awaitable[bytes]]

Json = dict[str, Any]
PREFIX = "chatcmpl-"


def store_of(context: RequestContext) -> ResponseStore:
    """Where chats are kept; InvalidRequest where nothing is."""
    store = context.services.store
    if store is None:
        raise InvalidRequest("store: this server keeps no chats", field="store")
    return store


async def kept(
    context: RequestContext, events: Events, reply: ChatReply, document: Json, fold: FoldChat
) -> Events:
    """The events; the chat is stored before its last one. `document`: the request's; `fold`: what
    makes the full answer of them."""
    store = store_of(context)
    past: list[Event] = []
    num_open = reply.fields.num_choices
    async with aclosing(events):
        async for event in events:
            past.append(event)
            num_open -= isinstance(event, Ended)
            if not num_open:
                num_open = -1
                answer = orjson.loads(await fold(_again(past), reply))
                await _keep(store, context, answer, document)
            yield event


async def _keep(
    store: ResponseStore, context: RequestContext, answer: Json, document: Json
) -> None:
    answer["metadata"] = document.get("metadata") or {}
    record = Record(
        id=answer["id"],
        owner=context.tenant,
        previous=None,
        response=orjson.dumps(answer),
        input=orjson.dumps(document["messages"]),
    )
    await store.put(record)
    await store.chats.add(record.id, context.tenant, time.time())


async def _again(past: list[Event]) -> Events:
    for event in past:
        yield event
