"""The handlers of the OpenAI routes: check, render, tokenize, generate, answer. Shapes: chat.py, completions.py."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from headrace.front.client.events import Events
from headrace.front.client.together import PatientEngine
from headrace.front.server.conversation import as_sent, begin, generate, streamed
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import completion_id
from headrace.front.server.measure import joined
from headrace.front.server.openai import chat, completions
from headrace.front.server.openai.calls import called
from headrace.front.server.openai.legacy import without_calls
from headrace.front.server.openai.padding import padded
from headrace.front.server.openai.sampling import truncated
from headrace.front.server.openai.schema import ChatRequest, Common, CompletionRequest, parse
from headrace.front.server.sse import Chunks
from headrace.front.server.structured import plain_structure
from headrace.front.server.tokens.told import spans
from headrace.front.text.fim import between
from headrace.front.text.tokenizer import Tokenizer

Answered = tuple[chat.ChatReply, Events]


async def post_chat(exchange: Exchange, document: Any) -> Response:
    """POST /v1/chat/completions."""
    request = parse(document, ChatRequest)
    reply, events = await answered(exchange, request, label=completion_id("chatcmpl"))
    if request.stream:
        return await _streamed(exchange, request, chat.to_chunks(events, reply))
    return Response(await chat.to_answer(events, reply), media_type="application/json")


async def answered(exchange: Exchange, request: ChatRequest, *, label: str) -> Answered:
    """One conversation: what its chunks share, and the events of its answer."""
    model = exchange.services.model_name(request.model)
    if without_calls(request):
        ids, events = await begin(exchange, request, label=label)
    else:
        request, ids, events = await _begin_with_calls(exchange, request, label=label)
    reply = chat.ChatReply(id=label, model=model, request=request, prompt_ids=ids)
    if request.return_prompt_text or request.return_token_offsets:
        reply = with_told(reply, exchange.services.tokenizer)
    return reply, events


def with_told(reply: chat.ChatReply, tokenizer: Tokenizer) -> chat.ChatReply:
    """What the chat asks to be told of its prompt and its tokens."""
    if reply.request.return_prompt_text:
        text = tokenizer.decode(reply.prompt_ids, skip_special_tokens=False)
        reply = replace(reply, prompt_text=text)
    if reply.request.return_token_offsets:
        reply = replace(reply, spans=partial(spans, tokenizer))
    return reply


async def _begin_with_calls(
    exchange: Exchange, request: ChatRequest, *, label: str
) -> tuple[ChatRequest, list[int], Events]:
    """`begin` for a request with tools or calls of any kind; errors name the fields that were sent."""
    found = called(request)
    with as_sent(found.said):
        ids, events = await begin(exchange, found.request, label=label)
    return found.request, ids, found.told(events)


async def _streamed(exchange: Exchange, request: Common, chunks: Chunks) -> Response:
    options = request.stream_options
    pads = options is not None and options.include_obfuscation
    return await streamed(exchange, padded(chunks) if pads else chunks)


async def post_completions(exchange: Exchange, document: Any) -> Response:
    """POST /v1/completions."""
    request = parse(document, CompletionRequest)
    services = exchange.services
    model = services.model_name(request.model)
    params = completions.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )
    given = completions.prompts_of(request)
    if len(given) > 1:
        exchange.crowd = PatientEngine(services.engine)
    structure = plain_structure(request)
    exchange.hold_place()
    prompts = [await prompt_of(exchange, request, prompt) for prompt in given]
    label = completion_id("cmpl")
    events = joined(
        [
            generate(
                *(exchange, request, p.ids, params),
                label=f"{label}-{i}" if i else label,
                structure=structure,
            )
            for i, p in enumerate(prompts)
        ],
        window=max(1, services.engine.window // params.n),
    )
    reply = completions.CompletionReply(
        id=label,
        model=model,
        created=int(time.time()),
        request=request,
        prompts=prompts,
        spans=partial(spans, services.tokenizer) if request.return_token_offsets else None,
    )
    if request.stream:
        return await _streamed(exchange, request, completions.to_chunks(events, reply))
    return Response(await completions.to_answer(events, reply), media_type="application/json")


async def prompt_of(
    exchange: Exchange, request: CompletionRequest, given: str | list[int]
) -> completions.Prompt:
    """One prompt of a completion as ids, with its text where it is echoed."""
    tokenizer = exchange.services.tokenizer
    if isinstance(given, str):
        special = True if request.add_special_tokens is None else request.add_special_tokens
        limit = None
        if request.truncate_prompt_tokens is None:
            limit = exchange.services.text.max_model_len
        ids = await tokenizer.encode_async(given, add_special_tokens=special, max_tokens=limit)
    else:
        tokenizer.check_ids(given, field="prompt")
        ids = given
    ids = truncated(ids, request, max_model_len=exchange.services.text.max_model_len)
    if request.suffix:
        tokenizer.check_length(request.suffix, exchange.services.text.max_model_len)
        ids = between(tokenizer, ids, request.suffix)
    told = tokenizer.decode(ids, skip_special_tokens=False) if request.return_prompt_text else None
    if not request.echo:
        return completions.Prompt(ids=ids, told=told)
    text = given if isinstance(given, str) else tokenizer.decode(ids)
    first = tokenizer.token_text(ids[0]) if ids else ""
    return completions.Prompt(ids=ids, text=text, first=first, told=told)
