"""Requests to token ids and back, without an engine: render -> generate -> derender is what the direct route does.

A rendered request is what /inference/v1/generate takes. Derendering runs the generated ids through the same
detokenizer, stop strings, parsers and fold as a generation, so that the answers cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.base.wire.params import SamplingParams, StopRules
from headrace.base.wire.request import Finished
from headrace.front.client.events import (
    Delta,
    Event,
    Events,
    PromptScored,
    ScoredToken,
    Started,
    TokenScore,
)
from headrace.front.client.outputs import Answer
from headrace.front.server.conversation import as_sent, parsers, render
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import completion_id
from headrace.front.server.measure import joined
from headrace.front.server.openai import chat, completions
from headrace.front.server.openai.calls import called
from headrace.front.server.openai.routes import prompt_of, with_told
from headrace.front.server.openai.sampling import truncated
from headrace.front.server.openai.schema import ChatRequest, Common, CompletionRequest, parse
from headrace.front.server.parsed import parsed, without_reasoning
from headrace.front.server.structured import is_plain, narrowed, structure_of
from headrace.front.server.tokens.schema import (
    DerenderRequest,
    Generated,
    GeneratedChoice,
    PromptScores,
    ScoredEntry,
    TokenSampling,
    TopToken,
)
from headrace.front.server.tokens.told import spans, taken_out, told
from headrace.front.text.tokenizer import Tokenizer

CONTEXT = (
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"),
    *("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    *("functions", "function_call"),
)
_BESIDE = frozenset({"model", "stream", "stream_options", "cache_salt", "priority"})


async def post_render_chat(exchange: Exchange, document: Any) -> Response:
    """POST /v1/chat/completions/render."""
    return json_response(await render_chat(exchange, document))


async def render_chat(exchange: Exchange, document: Any) -> dict[str, Any]:
    """The generate request of a chat as it was sent, with what it asks to be told."""
    document, asks = taken_out(document)
    made = await rendered_chat(exchange, parse(document, ChatRequest))
    return made | told(exchange.services.tokenizer, made["token_ids"], asks)


async def rendered_chat(exchange: Exchange, request: ChatRequest) -> dict[str, Any]:
    """The generate request of a chat. Tools of other kinds than functions stay what they are in its context."""
    found = called(request)
    with as_sent(found.said):
        plain = found.request if is_plain(found.request) else narrowed(found.request)
        params = _chat_params(exchange, plain)
        ids = await chat_ids(exchange, plain)
        _refuse_structure(exchange, plain, ids)
    context = context_of(request if found.custom or request.functions else plain)
    return _rendered(exchange, plain, ids, params) | {"parse_context": context}


def _refuse_structure(exchange: Exchange, request: ChatRequest, ids: list[int]) -> None:
    """A constraint behind reasoning, or one that forces calls, is no sampling field: token routes cannot carry it."""
    services = exchange.services
    tail = services.answers.prompt_tail(services.tokenizer, ids)
    structure = structure_of(request, services.answers, prompt_tail=tail)
    if structure.grammar is not None or structure.reasoning is not None:
        field = structure.field if structure.grammar is not None else "thinking_token_budget"
        raise InvalidRequest(
            f"{field}: a rendered request cannot carry it; use /v1/chat/completions", field=field
        )


async def post_render_completion(exchange: Exchange, document: Any) -> Response:
    """POST /v1/completions/render: one generate request per prompt."""
    return json_response(await render_completion(exchange, document))


async def render_completion(exchange: Exchange, document: Any) -> list[dict[str, Any]]:
    """The generate requests of a completion as it was sent, with what it asks to be told."""
    document, asks = taken_out(document)
    made = await rendered_completion(exchange, parse(document, CompletionRequest))
    tokenizer = exchange.services.tokenizer
    return [one | told(tokenizer, one["token_ids"], asks) for one in made]


async def rendered_completion(
    exchange: Exchange, request: CompletionRequest
) -> list[dict[str, Any]]:
    """The generate requests of a completion."""
    params = _completion_params(exchange, request)
    prompts = [await prompt_of(exchange, request, p) for p in completions.prompts_of(request)]
    return [_rendered(exchange, request, prompt.ids, params) for prompt in prompts]


def context_of(request: ChatRequest) -> dict[str, Any]:
    """What the answer's parser must know of a chat; its messages and how to sample are told elsewhere."""
    found = {name: getattr(request, name) for name in CONTEXT}
    return {name: msgspec.to_builtins(value) for name, value in found.items() if value is not None}


async def post_derender_chat(exchange: Exchange, document: Any) -> Response:
    """POST /v1/chat/completions/derender: generated ids as a chat completion."""
    given = parse(document, DerenderRequest)
    sent = msgspec.structs.replace(parse(given.request, ChatRequest), stream=None)
    found = called(msgspec.structs.replace(sent, stream_options=None))
    with as_sent(found.said):
        request = narrowed(found.request)
        params = _chat_params(exchange, request)
        _check(exchange, given, most=params.n)
        ids = given.token_ids or await chat_ids(exchange, request)
        answers = parsers(exchange, request, ids, params)
    marked = exchange.services.answers.pieces is not None
    pieces = answers[0].pieces if answers and marked else None
    events: Events = _events(exchange, ids, given.response, params, pieces)
    if answers is not None:
        events = found.told(parsed(events, answers))
        if request.include_reasoning is False:
            events = without_reasoning(events)
    model = exchange.services.model_name(request.model)
    reply = chat.ChatReply(
        id=completion_id("chatcmpl"), model=model, request=request, prompt_ids=ids
    )
    reply = with_told(reply, exchange.services.tokenizer)
    return Response(await chat.to_answer(events, reply), media_type="application/json")


async def post_derender_completion(exchange: Exchange, document: Any) -> Response:
    """POST /v1/completions/derender: generated ids of one prompt as a text completion."""
    given = parse(document, DerenderRequest)
    request = msgspec.structs.replace(parse(given.request, CompletionRequest), stream=None)
    request = msgspec.structs.replace(request, stream_options=None)
    params = _completion_params(exchange, request)
    _check(exchange, given, most=params.n)
    prompts = completions.prompts_of(request)
    if len(prompts) != 1:
        raise InvalidRequest(
            f"request.prompt: {len(prompts)} prompts given; derender them one by one",
            field="request.prompt",
        )
    prompt = await prompt_of(exchange, request, prompts[0])
    events = _events(exchange, prompt.ids, given.response, params)
    reply = completions.CompletionReply(
        id=completion_id("cmpl"),
        created=int(time.time()),
        model=exchange.services.model_name(request.model),
        request=request,
        prompts=[prompt],
        spans=partial(spans, exchange.services.tokenizer) if request.return_token_offsets else None,
    )
    body = await completions.to_answer(joined([events]), reply)
    return Response(body, media_type="application/json")


async def chat_ids(exchange: Exchange, request: ChatRequest) -> list[int]:
    """The prompt of a chat, as a generation would get it."""
    limit = exchange.services.text.max_model_len
    return truncated(await render(exchange, request), request, max_model_len=limit)


def _chat_params(exchange: Exchange, request: ChatRequest) -> SamplingParams:
    services = exchange.services
    services.model_name(request.model)
    return chat.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )


def _completion_params(exchange: Exchange, request: CompletionRequest) -> SamplingParams:
    services = exchange.services
    services.model_name(request.model)
    return completions.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )


def _rendered(
    exchange: Exchange, request: Common, ids: list[int], params: SamplingParams
) -> dict[str, Any]:
    """The generate request: the request's own sampling fields, and what follows from it for the tokens."""
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
        "model": exchange.services.model_name(request.model),
        "stream": bool(request.stream),
        "stream_options": msgspec.to_builtins(request.stream_options),
        "cache_salt": request.cache_salt,
        "priority": request.priority or 0,
        "kv_transfer_params": None,
        "output_mode": "tokens",
    }


def _check(exchange: Exchange, given: DerenderRequest, *, most: int) -> None:
    indices = [choice.index for choice in given.response.choices]
    if sorted(indices) != list(range(most)):
        raise InvalidRequest(
            f"response.choices: {len(indices)} given; the request asks for {most}, indexed from 0",
            field="response.choices",
        )
    check = exchange.services.tokenizer.check_ids
    check(given.token_ids or (), field="token_ids")
    for scores in given.response.prompt_logprobs or ():
        check([int(token_id) for token_id in scores or ()], field="response.prompt_logprobs")
    for choice in given.response.choices:
        check(choice.token_ids, field="response.choices.token_ids")
        entries = choice.logprobs.content if choice.logprobs else []
        check([e.token_id for e in entries], field="response.choices.logprobs")
        check([t.token_id for e in entries for t in e.top_logprobs], field="response.choices")


async def _events(
    exchange: Exchange,
    prompt_ids: list[int],
    generated: Generated,
    params: SamplingParams,
    pieces: Mapping[int, str | bytes] | None = None,
) -> Events:
    """The events that the generation had, merged per choice."""
    services = exchange.services
    tokenizer = services.tokenizer
    eos = () if params.ignore_eos else services.text.eos_ids
    stop_ids = (*params.stop_token_ids, *eos)
    yield Started(len(prompt_ids))
    cached = generated.usage.prompt_tokens_details.cached_tokens
    if generated.prompt_logprobs is not None:
        yield PromptScored([_prompt_score(tokenizer, told) for told in generated.prompt_logprobs])
    plain = msgspec.structs.replace(params, logprobs=None, prompt_logprobs=None)
    for choice in sorted(generated.choices, key=lambda choice: choice.index):
        for event in _replayed(tokenizer, choice, plain, stop_ids, pieces, cached):
            if isinstance(event, Delta):
                scores = _scores(tokenizer, choice)
                event = msgspec.structs.replace(event, token_ids=choice.token_ids, scores=scores)
            yield event


def _replayed(
    tokenizer: Tokenizer,
    choice: GeneratedChoice,
    params: SamplingParams,
    stop_ids: tuple[int, ...],
    pieces: Mapping[int, str | bytes] | None,
    cached: int,
) -> list[Event]:
    ids = choice.token_ids
    stop_id = choice.stop_reason if isinstance(choice.stop_reason, int) else None
    answer = Answer(
        index=choice.index,
        tokenizer=tokenizer,
        params=params,
        stop=StopRules(max_tokens=len(ids), stop_ids=stop_ids),
        pieces=pieces,
    )
    for token_id in ids:
        if answer.add_token(token_id, None):
            break
    answer.finish(Finished(id=0, reason=choice.finish_reason, stop_id=stop_id, num_cached=cached))
    return answer.take(0)


def _scores(tokenizer: Tokenizer, choice: GeneratedChoice) -> list[ScoredToken] | None:
    if choice.logprobs is None:
        return None
    return [
        ScoredToken(_score(tokenizer, entry), [_score(tokenizer, t) for t in entry.top_logprobs])
        for entry in choice.logprobs.content
    ]


def _prompt_score(tokenizer: Tokenizer, told: PromptScores) -> ScoredToken | None:
    if told is None:
        return None
    token, *others = [
        _token_score(tokenizer, int(token_id), one.logprob, one.rank)
        for token_id, one in told.items()
    ]
    return ScoredToken(token=token, top=others)


def _score(tokenizer: Tokenizer, given: ScoredEntry | TopToken) -> TokenScore:
    return _token_score(tokenizer, given.token_id, given.logprob, given.rank)


def _token_score(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None
) -> TokenScore:
    piece = tokenizer.pieces[token_id]
    text, data = (piece, piece.encode()) if isinstance(piece, str) else ("", piece)
    return TokenScore(token_id, logprob, text, data, rank)
