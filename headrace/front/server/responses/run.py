"""One response from its request to its last event, the same for HTTP, the background and the
WebSocket.

`prepare` reads what came before and checks everything that can be checked; `run` yields the events
and stores the response before it tells that it is complete, so that the next turn finds it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
import orjson

from headrace.base.errors import ContextTooLong, InvalidRequest, NotFound
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.pipeline import begin, prompt_ids
from headrace.front.server.conversation.resolved import (
    Conversation,
    PromptSource,
    SentNames,
    TranslatedRequest,
    as_sent,
)
from headrace.front.server.http.auth import RESPONSE_PREFIX, response_id
from headrace.front.server.responses import conversations
from headrace.front.server.responses.conversation import to_conversation, to_request
from headrace.front.server.responses.document import ResponseReply
from headrace.front.server.responses.items import response_of, with_ids
from headrace.front.server.responses.schema import (
    InputRequest,
    Json,
    ResponsesRequest,
    conversation_of,
)
from headrace.front.server.responses.server_tools import (
    MAX_CALLS,
    LaterRound,
    outputs,
    tools_of,
    without_choice,
)
from headrace.front.server.responses.stream import OF_CLIENTS, TERMINAL, ResponseStream
from headrace.front.server.responses.tools import Offered
from headrace.front.server.state.responses import MAX_CHAIN, Record

PURPOSE = "reasoning"
MAX_REFERRED = 64
_RESERVED_SHARE = 8


class Recall(Protocol):
    """Finds the items of earlier responses."""

    def __call__(self, ident: str, *, alone: bool = False) -> Awaitable[list[Json] | None]:
        """The items of a response and of those before it, or its own `alone`; None if it is not
        there."""
        ...


class PreviousResponseNotFound(InvalidRequest):
    """No such response, or not this key's, or no longer."""


@dataclass(kw_only=True)
class Prepared:
    """A checked request. `history` are the items before it, `own_items` its own."""

    context: RequestContext
    reply: ResponseReply
    history: list[Json]
    own_items: list[Json]
    conversation: Conversation
    stream: ResponseStream


async def prepare(
    context: RequestContext, request: ResponsesRequest, document: Json, *, recall: Recall
) -> Prepared:
    """Everything before the engine is asked; raises what is wrong with the request."""
    services = context.services
    if request.store and services.store is None:
        raise InvalidRequest("store: this server keeps no responses", field="store")
    ident = response_id()
    history, own_items, tools, translated = await translate(
        context, request, document, ident=ident, recall=recall
    )
    conversation = to_conversation(translated, services.served, id=ident)
    if request.truncation == "auto":
        conversation = await _fitting(context, conversation)
    reply = ResponseReply(
        id=ident,
        model=conversation.model,
        created=int(time.time()),
        request=request,
        document=document,
        tools=tools,
        seal=lambda text: services.sealer.seal(text, owner=context.tenant, purpose=PURPOSE),
        stored=services.store is not None and request.store is not False,
        defaults=dict(services.text.generation_defaults),
        decode=partial(services.tokenizer.decode, skip_special_tokens=False)
        if request.enable_response_messages
        else None,
    )
    return Prepared(
        context=context,
        reply=reply,
        history=history,
        own_items=own_items,
        conversation=conversation,
        stream=ResponseStream(reply, "queued" if request.background else "in_progress"),
    )


async def translate(
    context: RequestContext, request: InputRequest, document: Json, *, ident: str, recall: Recall
) -> tuple[list[Json], list[Json], Offered, TranslatedRequest]:
    """The items before the request, its own, its tools, and all of them as a conversation."""
    services = context.services
    services.model_name(request.model)
    history: list[Json] = []
    if request.previous_response_id is not None:
        earlier = await recall(request.previous_response_id)
        if earlier is None:
            raise await _not_found(context, request.previous_response_id)
        history = earlier
    if (talk := conversation_of(request)) is not None:
        history = await conversations.history_of(context, talk)
    own_items = with_ids(await _resolved(request.input, recall), ident)
    tools = await tools_of(services, request, [*history, *own_items])
    translated = _translated(context, request, document, tools, history, own_items)
    return history, own_items, tools, translated


def _translated(
    context: RequestContext,
    request: InputRequest,
    document: Json,
    tools: Offered,
    history: Sequence[Json],
    own_items: Sequence[Json],
) -> TranslatedRequest:
    services = context.services

    def unseal(sealed: str) -> str | None:
        return services.sealer.open(sealed, owner=context.tenant, purpose=PURPOSE)

    return to_request(
        request,
        document,
        tools=tools,
        history=history,
        own_items=own_items,
        unseal=unseal,
        max_model_len=services.text.max_model_len,
    )


async def _not_found(context: RequestContext, ident: str) -> PreviousResponseNotFound:
    """Why a response cannot be gone on from: it is not there, not yet complete, or one before it is
    gone."""
    kept = context.services.store
    record = None
    if kept is not None and ident.startswith(RESPONSE_PREFIX):
        record = await kept.get(ident, context.tenant)
    why = "is not there (any more)"
    if record is not None and record.running:
        why = "is still being made; wait for its end"
    elif record is not None:
        why = "goes on from a response that is not there (any more)"
    return PreviousResponseNotFound(
        f"previous_response_id: {ident!r:.80} {why}", field="previous_response_id"
    )


async def _resolved(items: str | Sequence[Json] | None, recall: Recall) -> str | list[Json] | None:
    """The input with references replaced by the items they name."""
    if items is None or isinstance(items, str):
        return items
    sent_items = []
    known: dict[str | None, list[Json]] = {None: []}
    for i, item in enumerate(items):
        if item.get("type") != "item_reference":
            sent_items.append(item)
            continue
        ident = item.get("id")
        owner = response_of(ident) if isinstance(ident, str) else None
        if owner not in known:
            _check_referred(len(known), f"input[{i}].id")
            known[owner] = await recall(owner or "", alone=True) or []
        referred = next((each for each in known[owner] if each.get("id") == ident), None)
        if referred is None:
            raise InvalidRequest(
                f"input[{i}].id: no item {ident!r:.80} is stored; send the item itself",
                field=f"input[{i}].id",
            )
        sent_items.append(referred)
    return sent_items


def _check_referred(count: int, field: str) -> None:
    if count > MAX_REFERRED:
        raise InvalidRequest(
            f"{field}: items of more than {MAX_REFERRED} responses are referred to; send them",
            field=field,
        )


async def _fitting(context: RequestContext, conversation: Conversation) -> Conversation:
    """truncation auto: without the oldest turns, as many as must go (found by halving), if the
    whole does not fit."""
    prompt, sent = conversation.prompt, conversation.sent
    messages = prompt.messages
    lead = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    turns = [lead, *(i for i in range(lead + 1, len(messages)) if messages[i]["role"] == "user")]
    limit = context.services.text.max_model_len
    reserve = min(conversation.params.max_tokens or limit, max(limit // _RESERVED_SHARE, 1))

    def without(drop: int) -> PromptSource:
        return replace(prompt, messages=messages[:lead] + messages[turns[drop] :])

    async def fits(drop: int) -> bool:
        try:
            ids = await prompt_ids(context, without(drop))
        except ContextTooLong:
            return False
        return len(ids) + reserve <= limit

    with as_sent(sent):
        if await fits(0):
            return conversation
        low, high = 0, len(turns) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await fits(middle) else (middle, high)
    places = [*sent.places[:lead], *sent.places[turns[high] :]]
    sent = SentNames(places=places, names=sent.names)
    return replace(conversation, prompt=without(high), sent=sent)


async def run(prepared: Prepared, *, keep: bool = True) -> AsyncGenerator[Json, None]:
    """The response's events; it is stored before its last one. Failures are raised."""
    async with aclosing(_rounds(prepared)) as events:
        async for event in events:
            if keep and event["type"] in TERMINAL:
                await store(prepared)
            yield event


async def _rounds(prepared: Prepared) -> AsyncGenerator[Json, None]:
    """One generation, and further ones while the model calls tools that are run here."""
    stream, context = prepared.stream, prepared.context
    most = min(MAX_CALLS, prepared.reply.request.max_tool_calls or MAX_CALLS)
    conversation, num_calls, num_items = prepared.conversation, 0, 0
    while True:
        stream.prompt_ids, generation = await begin(context, conversation)
        async with aclosing(generation):
            async for event in generation:
                for event_ in stream.take(event):
                    yield event_
        if not stream.pending:
            break
        calls = list(stream.pending)
        async with aclosing(outputs(prepared.context, calls, num_calls, most)) as results:
            async for call, output, error in results:
                for event_ in stream.run_call(call, output, error):
                    yield event_
        num_calls += len(calls)
        items = stream.response["output"]
        if any(item["type"] in OF_CLIENTS for item in items[num_items:]):
            for event_ in stream.finish():
                yield event_
            break
        num_items = len(items)
        if context is not prepared.context:
            context.held.close()
        context = LaterRound.of(prepared.context)
        prepared.context.held.callback(context.held.close)
        continued = await _continued(prepared, calls_left=num_calls < most)
        if continued is None:
            for event_ in stream.finish("max_output_tokens"):
                yield event_
            break
        conversation = continued
    prepared.context.timeline = context.timeline


async def _continued(prepared: Prepared, *, calls_left: bool) -> Conversation | None:
    """What comes behind the calls that were run; None where no token of the answer is left."""
    context, request, stream = prepared.context, prepared.reply.request, prepared.stream
    items = [item for item in stream.response["output"] if item["type"] != "mcp_list_tools"]
    translated = _translated(
        context,
        without_choice(request, calls_left=calls_left),
        prepared.reply.document,
        prepared.reply.tools,
        prepared.history,
        [*prepared.own_items, *items],
    )
    conversation = to_conversation(translated, context.services.served, id=prepared.reply.id)
    if request.truncation == "auto":
        conversation = await _fitting(context, conversation)
    if request.max_output_tokens is None:
        return conversation
    left = request.max_output_tokens - stream.num_output
    params = msgspec.structs.replace(conversation.params, max_tokens=left)
    return replace(conversation, params=params) if left > 0 else None


async def store(prepared: Prepared, *, running: bool = False) -> None:
    """Writes the response as it is now, if it is to be stored."""
    kept = prepared.context.services.store
    if kept is None or not prepared.reply.stored:
        return
    request = prepared.reply.request
    record = Record(
        id=prepared.reply.id,
        owner=prepared.context.tenant,
        previous=request.previous_response_id,
        response=orjson.dumps(prepared.stream.response),
        input=orjson.dumps(prepared.own_items),
        running=running,
    )
    await kept.put(record)
    talk = conversation_of(request)
    if talk is not None and prepared.stream.response["status"] in ("completed", "incomplete"):
        said = [*prepared.own_items, *prepared.stream.response["output"]]
        with suppress(NotFound):  # it was deleted meanwhile
            await conversations.add(prepared.context, talk, said)


def recall_from(context: RequestContext) -> Recall:
    """Reads them from the store; a conversation may be as large as a body."""
    most = context.services.server.max_body_bytes

    async def recall(ident: str, *, alone: bool = False) -> list[Json] | None:
        kept = context.services.store
        if kept is None or not ident.startswith(RESPONSE_PREFIX):
            return None
        depth = 1 if alone else MAX_CHAIN
        records = await kept.chain(ident, context.tenant, depth=depth, max_bytes=most)
        if not records or records[-1].running:
            return None
        items: list[Json] = []
        for record in records:
            items += orjson.loads(record.input)
            items += orjson.loads(record.response)["output"]
        return items

    return recall
