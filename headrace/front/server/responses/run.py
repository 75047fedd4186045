"""One response from its request to its last event, the same for HTTP, the background and the WebSocket.

`prepare` reads what came before and checks everything that can be checked; `run` yields the events and stores the
response before it tells that it is complete, so that the next turn finds it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import orjson

from headrace.base.errors import ContextTooLong, InvalidRequest, NotFound
from headrace.front.client.events import Events
from headrace.front.server.conversation import Translated, as_sent, begin_translated, render
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import RESPONSE_PREFIX, response_id
from headrace.front.server.openai.schema import ChatRequest
from headrace.front.server.responses import conversations
from headrace.front.server.responses.conversation import to_request
from headrace.front.server.responses.document import ResponseReply
from headrace.front.server.responses.items import response_of, with_ids
from headrace.front.server.responses.schema import (
    InputRequest,
    Json,
    ResponsesRequest,
    conversation_of,
)
from headrace.front.server.responses.stream import TERMINAL, ResponseStream
from headrace.front.server.responses.tools import offered
from headrace.front.server.state.store import MAX_CHAIN, Record

PURPOSE = "reasoning"
MAX_REFERRED = 64
_ROOM_SHARE = 8


class Recall(Protocol):
    """Finds the items of earlier responses."""

    def __call__(self, ident: str, *, alone: bool = False) -> Awaitable[list[Json] | None]:
        """The items of a response and of those before it, or its own `alone`; None if it is not there."""
        ...


class PreviousResponseNotFound(InvalidRequest):
    """No such response, or not this key's, or no longer."""

    code = "previous_response_not_found"


@dataclass(kw_only=True)
class Prepared:
    """A checked request. `history` are the items before it, `given` its own."""

    exchange: Exchange
    reply: ResponseReply
    history: list[Json]
    given: list[Json]
    translated: Translated
    chat: ChatRequest
    stream: ResponseStream


async def prepare(
    exchange: Exchange, request: ResponsesRequest, document: Json, *, recall: Recall
) -> Prepared:
    """Everything before the engine is asked; raises what is wrong with the request."""
    services = exchange.services
    if request.store and services.store is None:
        raise InvalidRequest("store: this server keeps no responses", field="store")
    ident = response_id()
    history, given, translated = await translate(
        exchange, request, document, ident=ident, recall=recall
    )
    chat = translated.typed()
    if request.truncation == "auto":
        translated, chat = await _fitting(exchange, translated, chat)
    reply = ResponseReply(
        id=ident,
        model=services.model_name(request.model),
        created=int(time.time()),
        request=request,
        document=document,
        tools=offered(request.tools),
        seal=lambda text: services.sealer.seal(text, owner=exchange.tenant, purpose=PURPOSE),
        stored=services.store is not None and request.store is not False,
        defaults=dict(services.text.generation_defaults),
    )
    return Prepared(
        exchange=exchange,
        reply=reply,
        history=history,
        given=given,
        translated=translated,
        chat=chat,
        stream=ResponseStream(reply, "queued" if request.background else "in_progress"),
    )


async def translate(
    exchange: Exchange, request: InputRequest, document: Json, *, ident: str, recall: Recall
) -> tuple[list[Json], list[Json], Translated]:
    """The items before the request, its own, and all of them as a conversation."""
    services = exchange.services
    services.model_name(request.model)
    history: list[Json] = []
    if request.previous_response_id is not None:
        found = await recall(request.previous_response_id)
        if found is None:
            raise await _not_found(exchange, request.previous_response_id)
        history = found
    if (talk := conversation_of(request)) is not None:
        history = await conversations.history_of(exchange, talk)
    given = with_ids(await _resolved(request.input, recall), ident)

    def unseal(sealed: str) -> str | None:
        return services.sealer.open(sealed, owner=exchange.tenant, purpose=PURPOSE)

    translated = to_request(
        request,
        document,
        tools=offered(request.tools),
        history=history,
        given=given,
        unseal=unseal,
        max_model_len=services.text.max_model_len,
    )
    return history, given, translated


async def _not_found(exchange: Exchange, ident: str) -> PreviousResponseNotFound:
    """Why a response cannot be gone on from: it is not there, not yet complete, or one before it is gone."""
    kept = exchange.services.store
    record = None
    if kept is not None and ident.startswith(RESPONSE_PREFIX):
        record = await kept.get(ident, exchange.tenant)
    why = "is not there (any more)"
    if record is not None and record.running:
        why = "is still being made; wait for its end"
    elif record is not None:
        why = "goes on from a response that is not there (any more)"
    return PreviousResponseNotFound(
        f"previous_response_id: {ident!r:.80} {why}", field="previous_response_id"
    )


async def _resolved(given: str | Sequence[Json] | None, recall: Recall) -> str | list[Json] | None:
    """The input with references replaced by the items they name."""
    if given is None or isinstance(given, str):
        return given
    made = []
    known: dict[str | None, list[Json]] = {None: []}
    for i, item in enumerate(given):
        if item.get("type") != "item_reference":
            made.append(item)
            continue
        ident = item.get("id")
        owner = response_of(ident) if isinstance(ident, str) else None
        if owner not in known:
            _check_referred(len(known), f"input[{i}].id")
            known[owner] = await recall(owner or "", alone=True) or []
        found = next((each for each in known[owner] if each.get("id") == ident), None)
        if found is None:
            raise InvalidRequest(
                f"input[{i}].id: no item {ident!r:.80} is stored; send the item itself",
                field=f"input[{i}].id",
            )
        made.append(found)
    return made


def _check_referred(count: int, field: str) -> None:
    if count > MAX_REFERRED:
        raise InvalidRequest(
            f"{field}: items of more than {MAX_REFERRED} responses are referred to; send them",
            field=field,
        )


async def _fitting(
    exchange: Exchange, translated: Translated, chat: ChatRequest
) -> tuple[Translated, ChatRequest]:
    """truncation auto: without the oldest turns, as many as must go (found by halving), if the whole does not fit."""
    messages = chat.messages
    lead = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    turns = [lead, *(i for i in range(lead + 1, len(messages)) if messages[i]["role"] == "user")]
    limit = exchange.services.text.max_model_len
    room = min(chat.max_completion_tokens or limit, max(limit // _ROOM_SHARE, 1))

    async def fits(drop: int) -> bool:
        kept = messages[:lead] + messages[turns[drop] :]
        try:
            ids = await render(exchange, msgspec.structs.replace(chat, messages=kept))
        except ContextTooLong:
            return False
        return len(ids) + room <= limit

    with as_sent(translated):
        if await fits(0):
            return translated, chat
        low, high = 0, len(turns) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await fits(middle) else (middle, high)
    places = [*translated.places[:lead], *translated.places[turns[high] :]]
    kept = messages[:lead] + messages[turns[high] :]
    cut = Translated(
        document=translated.document, places=places, names=translated.names, stop=translated.stop
    )
    return cut, msgspec.structs.replace(chat, messages=kept)


async def begin(prepared: Prepared) -> Events:
    """The events of the generation."""
    return await begin_translated(
        prepared.exchange, prepared.translated, prepared.chat, label=prepared.reply.id
    )


async def run(prepared: Prepared, *, keep: bool = True) -> AsyncGenerator[Json, None]:
    """The response's events; it is stored before its last one. Failures are raised."""
    events = await begin(prepared)
    async with aclosing(events):
        async for event in events:
            for made in prepared.stream.take(event):
                if keep and made["type"] in TERMINAL:
                    await store(prepared)
                yield made


async def store(prepared: Prepared, *, running: bool = False) -> None:
    """Writes the response as it is now, if it is to be stored."""
    kept = prepared.exchange.services.store
    if kept is None or not prepared.reply.stored:
        return
    request = prepared.reply.request
    record = Record(
        id=prepared.reply.id,
        owner=prepared.exchange.tenant,
        previous=request.previous_response_id,
        response=orjson.dumps(prepared.stream.response),
        input=orjson.dumps(prepared.given),
        running=running,
    )
    await kept.put(record)
    talk = conversation_of(request)
    if talk is not None and prepared.stream.response["status"] in ("completed", "incomplete"):
        said = [*prepared.given, *prepared.stream.response["output"]]
        with suppress(NotFound):  # it was deleted meanwhile
            await conversations.add(prepared.exchange, talk, said)


def recall_from(exchange: Exchange) -> Recall:
    """Reads them from the store; a conversation may be as large as a body."""
    most = exchange.services.server.max_body_bytes

    async def recall(ident: str, *, alone: bool = False) -> list[Json] | None:
        kept = exchange.services.store
        if kept is None or not ident.startswith(RESPONSE_PREFIX):
            return None
        depth = 1 if alone else MAX_CHAIN
        records = await kept.chain(ident, exchange.tenant, depth=depth, max_bytes=most)
        if not records or records[-1].running:
            return None
        found: list[Json] = []
        for record in records:
            found += orjson.loads(record.input)
            found += orjson.loads(record.response)["output"]
        return found

    return recall
