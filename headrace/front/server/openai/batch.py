"""POST /v1/chat/completions/batch: several conversations in one request, one answer with all choices.

`messages` is a list of conversations; everything else is as in /v1/chat/completions, without streaming. The choice
index is conversation * n + sample, as with several prompts of a completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import orjson
from msgspec import Meta
from starlette.responses import Response

from headrace.base.errors import InvalidRequest, RequestError
from headrace.front.client.together import PatientEngine
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import completion_id
from headrace.front.server.measure import joined
from headrace.front.server.openai import chat
from headrace.front.server.openai.completions import MAX_CHOICES
from headrace.front.server.openai.fold import Fold, usage
from headrace.front.server.openai.routes import answered
from headrace.front.server.openai.schema import ChatRequest, parse

MAX_CONVERSATIONS = 256


class BatchChatRequest(ChatRequest, frozen=True, kw_only=True):
    """As a chat, with a list of conversations; described here, parsed one conversation at a time."""

    messages: Annotated[  # type: ignore[assignment]  # a list of what a chat has
        list[Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]],
        Meta(min_length=1, max_length=MAX_CONVERSATIONS),
    ]


async def post_batch(exchange: Exchange, document: Any) -> Response:
    """Answers all conversations; the first that fails fails the request."""
    requests = _requests(document)
    label = completion_id("chatcmpl")
    if len(requests) > 1:
        exchange.crowd = PatientEngine(exchange.services.engine)
    replies, streams = [], []
    try:
        for number, request in enumerate(requests):
            with numbered(number):
                one = f"{label}-{number}" if number else label
                reply, events = await answered(exchange, request, label=one)
            streams.append(events)
            replies.append(reply)
    except BaseException:
        for events in streams:
            await events.aclose()
        raise
    folds = [Fold(request.n or 1) for request in requests]
    window = max(1, exchange.services.engine.window // folds[0].num_choices)
    async for number, event in joined(streams, window=window):
        folds[number].take(event)
    return Response(orjson.dumps(_answer(replies, folds)), media_type="application/json")


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Errors about a conversation's messages say which conversation it is."""
    try:
        yield
    except RequestError as error:
        field = error.field or ""
        if not field.startswith("messages"):
            raise
        place = f"messages[{number}]" + field.removeprefix("messages")
        told = error.message
        told = place + told.removeprefix(field) if told.startswith(field) else f"{place}: {told}"
        raise type(error)(told, field=place) from None


def _requests(document: Any) -> list[ChatRequest]:
    """One chat request per conversation."""
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    given = document.get("messages")
    listed = isinstance(given, list) and all(isinstance(one, list) for one in given)
    if not listed or not given:
        raise InvalidRequest("messages: a list of lists of messages is needed", field="messages")
    if len(given) > MAX_CONVERSATIONS:
        raise InvalidRequest(
            f"messages: {len(given)} conversations given, {MAX_CONVERSATIONS} allowed",
            field="messages",
        )
    if document.get("stream"):
        raise InvalidRequest("stream: a batch is not streamed", field="stream")
    requests = []
    for number, one in enumerate(given):
        with numbered(number):
            requests.append(parse({**document, "messages": one}, ChatRequest))
    if len(requests) * (requests[0].n or 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"n: {len(requests)} conversations with {requests[0].n} choices each; "
            f"{MAX_CHOICES} in all allowed",
            field="n",
        )
    return requests


def _answer(replies: list[chat.ChatReply], folds: list[Fold]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for reply, fold in zip(replies, folds, strict=True):
        for index in range(fold.num_choices):
            choice = chat.choice_of(reply, fold, index)
            choices.append(choice | {"index": len(choices)})
    first = replies[0]
    return {
        "id": first.id,
        "object": "chat.completion",
        "created": first.created,
        "model": first.model,
        "choices": choices,
        "usage": usage(folds),
    }
