"""POST /inference/v1/generate: token ids in, token ids out, whole or as a stream. Nothing is rendered or parsed.

Log-probabilities that JSON cannot hold are -9999, with no rank.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Delta, Ended, Events, ScoredToken, TokenScore
from headrace.front.server.conversation import as_sent, generate, parsers, streamed
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import completion_id, own_id
from headrace.front.server.openai import chat
from headrace.front.server.openai.calls import called
from headrace.front.server.openai.fold import (
    LOWEST,
    Choice,
    Fold,
    Spans,
    logprob,
    scores_by_id,
    stop_reason,
    usage,
)
from headrace.front.server.openai.sampling import sampling_params
from headrace.front.server.openai.schema import ChatRequest, parse
from headrace.front.server.parsed import without_reasoning
from headrace.front.server.sse import DONE, Chunks
from headrace.front.server.structured import narrowed, plain_structure
from headrace.front.server.tokens.schema import GenerateRequest, TokenSampling
from headrace.front.server.tokens.told import spans


@dataclass(frozen=True, kw_only=True)
class GenerateReply:
    """What all chunks of one answer share."""

    id: str
    model: str
    created: int
    num_choices: int
    sampling: TokenSampling
    request: GenerateRequest
    spans: Spans | None = None


async def post_generate(exchange: Exchange, document: Any) -> Response:
    """POST /inference/v1/generate."""
    request = parse(document, GenerateRequest)
    if request.output_mode == "derender":
        return await _derendered(exchange, request)
    events, reply = begin_generate(exchange, request)
    if request.stream:
        return await streamed(exchange, _chunks(events, reply))
    return Response(await _answer(events, reply), media_type="application/json")


async def _derendered(exchange: Exchange, request: GenerateRequest) -> Response:
    """The chat completion that a rendered chat asks for, whole or as a stream."""
    beside = {"n": request.sampling_params.get("n"), "stream": request.stream or None}
    options = msgspec.to_builtins(request.stream_options)
    document = {
        **(request.parse_context or {}),
        **{name: value for name, value in beside.items() if value is not None},
        "stream_options": options if request.stream else None,
        "messages": [{"role": "user", "content": ""}],
    }
    found = called(parse(document, ChatRequest))
    with as_sent(found.said):
        talk = narrowed(found.request)
        events, reply = begin_generate(exchange, request, talk)
    events = found.told(events)
    told = chat.ChatReply(
        id=completion_id("chatcmpl"),
        model=reply.model,
        request=talk,
        prompt_ids=request.token_ids,
        spans=reply.spans,
    )
    if request.stream:
        return await streamed(exchange, chat.to_chunks(events, told))
    return Response(await chat.to_answer(events, told), media_type="application/json")


def begin_generate(
    exchange: Exchange, request: GenerateRequest, talk: ChatRequest | None = None
) -> tuple[Events, GenerateReply]:
    """The events of the answer, which run once they are read, and what its chunks share. With `talk` they are parsed as
    the answer to that chat."""
    services = exchange.services
    model = services.model_name(request.model)
    _refuse(request)
    sampling = sampling_of(request)
    limit = sampling.max_completion_tokens
    params = sampling_params(
        sampling,
        defaults=services.text.generation_defaults,
        max_n=services.server.max_n,
        best_of=sampling.best_of,
        max_tokens=sampling.max_tokens if limit is None else limit,
        logprobs=sampling.logprobs,
    )
    services.tokenizer.check_ids(request.token_ids, field="token_ids")
    exchange.hold_place()
    asked = request.request_id
    label = completion_id("gen") if asked is None else own_id(exchange.tenant, asked)
    events = generate(
        *(exchange, sampling, request.token_ids, params),
        label=label,
        answers=None if talk is None else parsers(exchange, talk, request.token_ids, params),
        structure=plain_structure(sampling),
    )
    if talk is not None and talk.include_reasoning is False:
        events = without_reasoning(events)
    reply = GenerateReply(
        id=label,
        model=model,
        created=int(time.time()),
        num_choices=params.n,
        sampling=sampling,
        request=request,
        spans=partial(spans, services.tokenizer) if sampling.return_token_offsets else None,
    )
    return events, reply


def _refuse(request: GenerateRequest) -> None:
    """What would choose a peer, or tensors of a client's making, is never taken (P5, P15)."""
    for field in ("features", "kv_transfer_params", "reasoning_parser_kwargs"):
        if getattr(request, field):
            raise InvalidRequest(f"{field}: not accepted by this server", field=field)


def sampling_of(request: GenerateRequest) -> TokenSampling:
    """The sampling fields, checked, together with those that stand beside them."""
    beside = {
        "stream": request.stream or None,
        "stream_options": msgspec.to_builtins(request.stream_options),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }
    given = {name: value for name, value in beside.items() if value is not None}
    return parse({**request.sampling_params, **given}, TokenSampling)


async def _answer(events: Events, reply: GenerateReply) -> bytes:
    fold = Fold(reply.num_choices)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
    found = _envelope(reply, [_choice(reply, i, c) for i, c in enumerate(fold.choices)])
    found["usage"] = usage([fold])
    found["prompt_logprobs"] = None
    if fold.prompt_scores is not None and reply.sampling.prompt_logprobs is not None:
        found["prompt_logprobs"] = scores_by_id(fold.prompt_scores)
    if reply.spans is not None:
        found["prompt_token_offsets"] = reply.spans(reply.request.token_ids, continues=False)
    return orjson.dumps(found)


async def _chunks(events: Events, reply: GenerateReply) -> Chunks:
    options = reply.request.stream_options
    fold = Fold(reply.num_choices)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
            match event:
                case Delta():
                    piece = Choice(token_ids=event.token_ids, scores=event.scores or [])
                    piece.text = [event.text]
                    yield _event(_envelope(reply, [_choice(reply, event.index, piece)]))
                case Ended():
                    end = Choice(ended=event)
                    yield _event(_envelope(reply, [_choice(reply, event.index, end)]))
    if options is not None and options.include_usage:
        yield _event({**_envelope(reply, []), "usage": usage([fold])})
    yield DONE


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _envelope(reply: GenerateReply, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "request_id": reply.request.request_id or reply.id,
        "id": reply.id,
        "object": "inference.generation",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _choice(reply: GenerateReply, index: int, choice: Choice) -> dict[str, Any]:
    ended = choice.ended
    found: dict[str, Any] = {
        "index": index,
        "token_ids": choice.token_ids,
        "finish_reason": None if ended is None else ended.reason,
        "stop_reason": None if ended is None else stop_reason(ended),
        "logprobs": None,
    }
    if choice.scores:
        found["logprobs"] = {"content": [_scored(scored) for scored in choice.scores]}
    if reply.spans is not None:
        found["token_offsets"] = reply.spans(choice.token_ids, continues=True)
    if reply.request.output_mode == "text":
        found["text"] = "".join(choice.text)
    return found


def _scored(scored: ScoredToken) -> dict[str, Any]:
    others = [_score(score) for score in (*scored.top, *scored.named)]
    return {**_score(scored.token), "top_logprobs": others}


def _score(score: TokenScore) -> dict[str, Any]:
    value = logprob(score.logprob)
    rank = None if value == LOWEST else score.rank
    return {"token_id": score.id, "logprob": value, "rank": rank}
