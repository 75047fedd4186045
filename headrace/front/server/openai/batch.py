"""POST /v1/chat/completions/batch: several conversations in one request, one answer with all
choices.

`messages` is a list of conversations; everything else is as in /v1/chat/completions, without
streaming. The choice index is conversation * n + sample, as with several prompts of a completion.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from msgspec import Meta
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.admission_retry import RetryingEngine
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import Fold, usage
from headrace.front.server.conversation.prompts import MAX_CHOICES
from headrace.front.server.conversation.request import ChatRequest, numbered, parse
from headrace.front.server.conversation.stages import joined
from headrace.front.server.http.auth import completion_id
from headrace.front.server.openai import chat
from headrace.front.server.openai.chat import answered, to_conversation

MAX_CONVERSATIONS = 256


class BatchChatRequest(ChatRequest, frozen=True, kw_only=True):
    """As a chat, with a list of conversations; described here, parsed one conversation at a
    time."""

    messages: Annotated[  # type: ignore[assignment]  # a list of what a chat has
        list[Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]],
        Meta(min_length=1, max_length=MAX_CONVERSATIONS),
    ]


async def post_batch(context: RequestContext, document: Any) -> Response:
    """Answers all conversations; the first that fails fails the request."""
    requests = _requests(document)
    label = completion_id("chatcmpl")
    if len(requests) > 1:
        context.retrying_engine = RetryingEngine(context.services.engine)
    replies, streams = [], []
    try:
        for number, request in enumerate(requests):
            with numbered(number):
                one = f"{label}-{number}" if number else label
                conversation = to_conversation(request, context.services.served, id=one)
                reply, events = await answered(context, conversation)
            streams.append(events)
            replies.append(reply)
    except BaseException:
        for events in streams:
            await events.aclose()
        raise
    folds = [Fold(request.n or 1) for request in requests]
    window = max(1, context.services.engine.window // folds[0].num_choices)
    async for number, event in joined(streams, window=window):
        folds[number].take(event)
    return Response(orjson.dumps(_answer(replies, folds)), media_type="application/json")


def _requests(document: Any) -> list[ChatRequest]:
    """One chat request per conversation."""
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    conversations = document.get("messages")
    listed = isinstance(conversations, list) and all(isinstance(one, list) for one in conversations)
    if not listed or not conversations:
        raise InvalidRequest("messages: a list of lists of messages is needed", field="messages")
    if len(conversations) > MAX_CONVERSATIONS:
        raise InvalidRequest(
            f"messages: {len(conversations)} conversations given, {MAX_CONVERSATIONS} allowed",
            field="messages",
        )
    if document.get("stream"):
        raise InvalidRequest("stream: a batch is not streamed", field="stream")
    requests = []
    for number, one in enumerate(conversations):
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
