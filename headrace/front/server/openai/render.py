"""The render and derender routes: render -> generate -> derender is what the direct route does.

Derendering runs the generated ids through the same detokenizer, stop strings, parsers and fold as a
generation, so that the answers cannot differ. All of it is there at once and waits for nothing: it
runs in a thread where there is much, and ends when its client leaves."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Events
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import parsers, prompt_ids
from headrace.front.server.conversation.prompts import prompt_of, prompts_of, spans
from headrace.front.server.conversation.rendering import (
    completion_sampling,
    render_chat,
    render_completion,
)
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest, parse
from headrace.front.server.conversation.resolved import Conversation, as_sent
from headrace.front.server.conversation.stages import joined, parsed, without_reasoning
from headrace.front.server.http.auth import completion_id
from headrace.front.server.openai import chat, completions
from headrace.front.server.openai.derender import (
    DerenderRequest,
    derender_chat,
    derender_completion,
    is_chunk,
)
from headrace.front.server.openai.derender_stream import (
    derendered_chat_chunk,
    derendered_completion_chunk,
)
from headrace.front.server.openai.replay import off_loop, whole_events

MAX_DERENDERED_TOKENS = 1 << 18
"""Of all choices together and their scores, where the model's context is not longer."""


async def post_render_chat(context: RequestContext, document: Any) -> Response:
    """POST /v1/chat/completions/render."""
    return json_response(await render_chat(context, document))


async def post_render_completion(context: RequestContext, document: Any) -> Response:
    """POST /v1/completions/render: one generate request per prompt."""
    return json_response(await render_completion(context, document))


async def post_derender_chat(context: RequestContext, document: Any) -> Response:
    """POST /v1/chat/completions/derender: generated ids as a chat completion; one chunk of a stream
    as a chunk of the chat's."""
    if is_chunk(document):
        return await derendered_chat_chunk(context, document)
    body, sent = derender_chat(document)
    request = msgspec.structs.replace(
        parse(body.request, ChatRequest), stream=None, stream_options=None
    )
    services = context.services
    conversation = chat.to_conversation(request, services.served, id=completion_id("chatcmpl"))
    context.hold_place()
    with as_sent(sent), as_sent(conversation.sent):
        _check_numbers(context, body, most=conversation.params.n)
        ids = body.token_ids or await prompt_ids(context, conversation.prompt)
        work = partial(_chat_answer, context, conversation, body, ids)
        answer = await off_loop(_num_tokens(body), work)
    return Response(answer, media_type="application/json")


async def _chat_answer(
    context: RequestContext, conversation: Conversation, body: DerenderRequest, ids: list[int]
) -> bytes:
    params = conversation.params
    _check_ids(context, body)
    answers = parsers(context, conversation.form, ids, params)
    marked = context.services.answers.pieces is not None
    pieces = answers[0].pieces if answers and marked else None
    events: Events = whole_events(context, ids, body, params, pieces)
    if answers is not None:
        events = conversation.calls.as_sent(parsed(events, answers))
        if not conversation.shows_reasoning:
            events = without_reasoning(events)
    return await chat.to_answer(events, chat.reply_of(context, conversation, ids))


async def post_derender_completion(context: RequestContext, document: Any) -> Response:
    """POST /v1/completions/derender: generated ids of one prompt as a text completion; in vLLM's
    body of several, or one chunk of a stream."""
    if is_chunk(document):
        return await derendered_completion_chunk(context, document)
    bodies, sent = derender_completion(document)
    request = msgspec.structs.replace(parse(bodies[0].request, CompletionRequest), stream=None)
    request = msgspec.structs.replace(request, stream_options=None)
    params = completion_sampling(context, request)
    context.hold_place()
    texts = prompts_of(request)
    if len(texts) != len(bodies):
        raise InvalidRequest(
            f"request.prompt: {len(texts)} prompts given, with answers to {len(bodies)}",
            field="request.prompt",
        )
    with as_sent(sent):
        for body in bodies:
            _check_numbers(context, body, most=params.n)
    prompts = [await prompt_of(context, request, text) for text in texts]
    reply = completions.CompletionReply(
        id=completion_id("cmpl"),
        created=int(time.time()),
        model=context.services.model_name(request.model),
        request=request,
        prompts=prompts,
        fields=completions.completion_fields(request, context.services.server),
        spans=partial(spans, context.services.tokenizer) if request.return_token_offsets else None,
    )

    async def answer() -> bytes:
        events: list[Events] = []
        for body, prompt in zip(bodies, prompts, strict=True):
            _check_ids(context, body)
            events.append(whole_events(context, prompt.ids, body, params))
        return await completions.to_answer(joined(events), reply)

    with as_sent(sent):
        encoded = await off_loop(sum(map(_num_tokens, bodies)), answer)
    return Response(encoded, media_type="application/json")


def _num_tokens(body: DerenderRequest) -> int:
    response = body.response
    entries = sum(len(c.logprobs.content) for c in response.choices if c.logprobs is not None)
    ids = sum(len(choice.token_ids) for choice in response.choices)
    return ids + entries + len(response.prompt_logprobs or ()) + len(body.token_ids or ())


def _check_numbers(context: RequestContext, body: DerenderRequest, *, most: int) -> None:
    """What no generation here can have been is refused before any work is done for it."""
    length = context.services.text.max_model_len
    total = max(length, MAX_DERENDERED_TOKENS)
    sizes = [len(choice.token_ids) for choice in body.response.choices]
    for field, count, allowed in (
        ("token_ids", len(body.token_ids or ()), length),
        ("response.choices.token_ids", max(sizes), length),
        ("response.choices", _num_tokens(body), total),
    ):
        if count > allowed:
            raise InvalidRequest(f"{field}: {count} tokens given; allowed: {allowed}", field=field)
    indices = [choice.index for choice in body.response.choices]
    if sorted(indices) != list(range(most)):
        raise InvalidRequest(
            f"response.choices: {len(indices)} given; the request asks for {most}, indexed from 0",
            field="response.choices",
        )


def _check_ids(context: RequestContext, body: DerenderRequest) -> None:
    check = context.services.tokenizer.check_ids
    check(body.token_ids or (), field="token_ids")
    for scores in body.response.prompt_logprobs or ():
        check([int(token_id) for token_id in scores or ()], field="response.prompt_logprobs")
    for choice in body.response.choices:
        check(choice.token_ids, field="response.choices.token_ids")
        entries = choice.logprobs.content if choice.logprobs else []
        check([e.token_id for e in entries], field="response.choices.logprobs")
        check([t.token_id for e in entries for t in e.top_logprobs], field="response.choices")
