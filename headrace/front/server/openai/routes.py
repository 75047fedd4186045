"""The handlers of the OpenAI routes: check, render, tokenize, generate, answer. Shapes: chat.py, completions.py."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import Response

from headrace.base.errors import Forbidden
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Event, Generation
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import completion_id
from headrace.front.server.measure import joined, measured
from headrace.front.server.openai import chat, completions
from headrace.front.server.openai.sampling import truncated
from headrace.front.server.openai.schema import ChatRequest, Common, CompletionRequest, parse
from headrace.front.server.parsed import ParsedAnswer, parsed
from headrace.front.server.sse import EventStream, started
from headrace.front.server.structured import (
    FREE,
    Structure,
    narrowed,
    plain_structure,
    structure_of,
)
from headrace.front.text.chat import ChatTemplate

_TAIL_TOKENS = 32
"""Enough of a prompt to see which tag it ends with."""


async def post_chat(exchange: Exchange, document: Any) -> Response:
    """POST /v1/chat/completions."""
    request = narrowed(parse(document, ChatRequest))
    services = exchange.services
    model = services.model_name(request.model)
    params = chat.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )
    exchange.hold_place()
    prompt_ids = truncated(
        await render(exchange, request), request, max_model_len=services.text.max_model_len
    )
    label = completion_id("chatcmpl")
    tail = _tail(exchange, prompt_ids)
    structure = structure_of(request, services.answers, prompt_tail=tail)
    answers = _answers(exchange, request, tail, params)
    events = _generate(
        *(exchange, request, prompt_ids, params),
        label=label,
        answers=answers,
        structure=structure,
    )
    reply = chat.Reply.now(id=label, model=model, request=request, prompt_ids=prompt_ids)
    if request.stream:
        return await _stream(exchange, chat.to_chunks(events, reply))
    return Response(await chat.to_answer(events, reply), media_type="application/json")


async def post_completions(exchange: Exchange, document: Any) -> Response:
    """POST /v1/completions."""
    request = parse(document, CompletionRequest)
    services = exchange.services
    model = services.model_name(request.model)
    params = completions.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )
    given = completions.prompts_of(request)
    structure = plain_structure(request)
    exchange.hold_place()
    prompts = [await _prompt(exchange, request, prompt) for prompt in given]
    label = completion_id("cmpl")
    events = joined(
        [
            _generate(
                *(exchange, request, p.ids, params),
                label=f"{label}-{i}" if i else label,
                structure=structure,
            )
            for i, p in enumerate(prompts)
        ]
    )
    reply = completions.Reply(
        id=label, model=model, created=int(time.time()), request=request, prompts=prompts
    )
    if request.stream:
        return await _stream(exchange, completions.to_chunks(events, reply))
    return Response(await completions.to_answer(events, reply), media_type="application/json")


async def render(exchange: Exchange, request: ChatRequest) -> list[int]:
    """The messages as token ids, through the model's chat template."""
    services = exchange.services
    template = services.template
    if request.chat_template is not None:
        if not services.server.trust_request_chat_template:
            raise Forbidden(
                "chat_template: this server does not take templates from requests",
                field="chat_template",
            )
        template = ChatTemplate(
            request.chat_template,
            services.tokenizer,
            pool=services.guest_templates,
            max_tokens=services.text.max_model_len,
        )
    tail = bool(request.continue_final_message)
    opens = not tail if request.add_generation_prompt is None else request.add_generation_prompt
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity", "documents"):
        if getattr(request, name) is not None:
            kwargs.setdefault(name, getattr(request, name))
    if request.reasoning_effort is not None:  # templates that know only on and off
        kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    return await template.render_async(
        request.messages,
        tools=None if request.tool_choice == "none" else request.tools,
        add_generation_prompt=opens,
        continue_final_message=tail,
        kwargs=kwargs,
    )


def _tail(exchange: Exchange, prompt_ids: list[int]) -> str:
    """How the prompt ends."""
    decode = exchange.services.tokenizer.decode
    return decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)


def _answers(
    exchange: Exchange, request: ChatRequest, tail: str, params: SamplingParams
) -> list[ParsedAnswer] | None:
    """A parser per choice; None where nothing is to be parsed."""
    services = exchange.services
    tokenizer = services.tokenizer
    pieces = tokenizer.pieces_without_special if params.skip_special_tokens else tokenizer.pieces
    found = []
    for _ in range(params.n):
        parser = chat.to_parser(request, services.answers, prompt_tail=tail)
        if parser is None:
            return None
        found.append(ParsedAnswer(parser, pieces))
    return found


async def _prompt(
    exchange: Exchange, request: CompletionRequest, given: str | list[int]
) -> completions.Prompt:
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
    if not request.echo:
        return completions.Prompt(ids=ids)
    text = given if isinstance(given, str) else tokenizer.decode(ids)
    first = tokenizer.token_text(ids[0]) if ids else ""
    return completions.Prompt(ids=ids, text=text, first=first)


def _generate(
    exchange: Exchange,
    request: Common,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    label: str,
    answers: list[ParsedAnswer] | None = None,
    structure: Structure = FREE,
) -> AsyncGenerator[Event, None]:
    generation = Generation(
        prompt_ids=prompt_ids,
        params=params,
        label=label,
        tenant=exchange.tenant,
        priority=request.priority or 0,
        deadline_s=exchange.deadline_s(request.timeout_s),
        cache_salt=request.cache_salt or "",
        grammar=structure.grammar,
        grammar_field=structure.field,
        reasoning=structure.reasoning,
    )
    services = exchange.services
    events: AsyncIterator[Event] = services.engine.generate(generation)
    if answers is not None:
        events = parsed(events, answers)
    return measured(events, services.metrics, arrival=exchange.arrival)


async def _stream(exchange: Exchange, chunks: AsyncGenerator[bytes, None]) -> Response:
    ping_s = exchange.services.server.ping_interval_s
    first = await started(chunks, patience_s=ping_s)
    return EventStream(
        *(first, chunks),
        request_id=exchange.request_id,
        abandon=exchange.services.abandon,
        ping_s=ping_s,
    )
