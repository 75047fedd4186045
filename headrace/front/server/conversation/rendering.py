"""Requests to token ids without an engine: a rendered request is what /inference/v1/generate takes.

Used by the render routes of every dialect and by gRPC."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.wire.request import SamplingParams
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.generation import TokenSampling
from headrace.front.server.conversation.pipeline import prompt_ids
from headrace.front.server.conversation.prompts import (
    prompt_facts,
    prompt_of,
    prompts_of,
    taken_out,
)
from headrace.front.server.conversation.request import (
    ChatRequest,
    Common,
    CompletionRequest,
    completion_params,
    parse,
)
from headrace.front.server.conversation.resolved import TranslatedRequest, as_sent, called, resolved
from headrace.front.server.conversation.structured import narrowed
from headrace.front.server.http.auth import completion_id

CONTEXT = (
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"),
    *("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    *("functions", "function_call", "thinking_token_budget"),
)


_BESIDE = frozenset({"model", "stream", "stream_options", "cache_salt", "priority"})


async def render_chat(context: RequestContext, document: Any) -> dict[str, Any]:
    """The generate request of a chat as it was sent, with what it asks to be told."""
    document, asks = taken_out(document)
    rendered = await rendered_chat(context, parse(document, ChatRequest))
    return rendered | await prompt_facts(context.services.tokenizer, rendered["token_ids"], asks)


async def rendered_chat(context: RequestContext, request: ChatRequest) -> dict[str, Any]:
    """The generate request of a chat. Tools of other kinds than functions stay what they are in its
    context."""
    conversation = resolved(request, context.services.served, id=completion_id("gen"))
    with as_sent(conversation.sent):
        ids = await prompt_ids(context, conversation.prompt)
    converted, calls = called(request)
    of_other_kinds = bool(calls.custom or calls.functions)
    parse_context = parse_context_of(request if of_other_kinds else narrowed(converted))
    rendered = _rendered(context, request, ids, conversation.params)
    return rendered | {"parse_context": parse_context}


async def render_completion(context: RequestContext, document: Any) -> list[dict[str, Any]]:
    """The generate requests of a completion as it was sent, with what it asks to be told."""
    document, asks = taken_out(document)
    rendered = await rendered_completion(context, parse(document, CompletionRequest))
    tokenizer = context.services.tokenizer
    return [one | await prompt_facts(tokenizer, one["token_ids"], asks) for one in rendered]


async def rendered_completion(
    context: RequestContext, request: CompletionRequest
) -> list[dict[str, Any]]:
    """The generate requests of a completion."""
    params = completion_sampling(context, request)
    prompts = [await prompt_of(context, request, p) for p in prompts_of(request)]
    return [_rendered(context, request, prompt.ids, params) for prompt in prompts]


def parse_context_of(request: ChatRequest) -> dict[str, Any]:
    """What the answer's parser must know of a chat, with the message that it continues; its other
    messages and how to sample are told elsewhere."""
    fields = {name: getattr(request, name) for name in CONTEXT}
    if request.continue_final_message:
        fields |= {"continue_final_message": True, "messages": request.messages[-1:]}
    return {name: msgspec.to_builtins(value) for name, value in fields.items() if value is not None}


def completion_sampling(context: RequestContext, request: CompletionRequest) -> SamplingParams:
    services = context.services
    services.model_name(request.model)
    return completion_params(
        request,
        defaults=services.text.generation_defaults,
        max_n=services.server.max_n,
        max_logprobs=services.server.max_logprobs,
    )


def _rendered(
    context: RequestContext, request: Common, ids: list[int], params: SamplingParams
) -> dict[str, Any]:
    """The generate request: the request's own sampling fields, and what follows from it for the
    tokens."""
    fields = {
        name: value
        for name in TokenSampling.__struct_fields__
        if name not in _BESIDE and (value := getattr(request, name, None)) is not None
    }
    fields.pop("max_completion_tokens", None)
    fields.pop("truncate_prompt_tokens", None)
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        fields[name] = getattr(params, name)
    return {
        "request_id": completion_id("gen"),
        "token_ids": ids,
        "features": None,
        "sampling_params": {
            name: msgspec.to_builtins(value) for name, value in fields.items() if value is not None
        },
        "model": context.services.model_name(request.model),
        "stream": bool(request.stream),
        "stream_options": msgspec.to_builtins(request.stream_options),
        "cache_salt": request.cache_salt,
        "priority": request.priority or 0,
        "kv_transfer_params": None,
        "output_mode": "tokens",
    }


async def rendered_translated(
    context: RequestContext, translated: TranslatedRequest, *, streams: bool
) -> dict[str, Any]:
    """The generate request of a translated request. Nothing is kept and nothing is looked up."""
    chat = translated.typed()
    with as_sent(translated):
        rendered = await rendered_chat(context, chat)
    return {**rendered, "stream": streams}
