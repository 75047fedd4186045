"""POST /inference/v1/generate: token ids in, token ids out, whole or as a stream. Nothing is
rendered or parsed.

Log-probabilities that JSON cannot hold are -9999, with no rank.
"""

from __future__ import annotations

import base64
from contextlib import aclosing
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import orjson
from starlette.responses import Response

from headrace.front.client.events import Delta, Ended, Events, ScoredToken, TokenScore
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import (
    LOWEST,
    Fold,
    FoldedChoice,
    alternatives,
    captured_documents,
    logprob,
    scores_by_id,
    stop_reason,
    usage,
)
from headrace.front.server.conversation.generation import (
    GenerateReply,
    GenerateRequest,
    begin_generate,
)
from headrace.front.server.conversation.pipeline import streamed
from headrace.front.server.conversation.request import ChatRequest, parse
from headrace.front.server.conversation.resolved import Conversation
from headrace.front.server.conversation.structured import ANSWER_FORM
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.sse import DONE, Chunks
from headrace.front.server.openai import chat


async def post_generate(context: RequestContext, document: Any) -> Response:
    """POST /inference/v1/generate."""
    request = parse(document, GenerateRequest)
    if request.output_mode == "derender":
        return await _derendered(context, request)
    chat_context = None if request.parse_context is None else _conversation(context, request)
    events, reply = begin_generate(context, request, chat_context)
    if request.stream:
        return await streamed(context, to_chunks(events, reply))
    return Response(await to_answer(events, reply), media_type="application/json")


async def _derendered(context: RequestContext, request: GenerateRequest) -> Response:
    """The chat completion that a rendered chat asks for, whole or as a stream."""
    conversation = _conversation(context, request)
    events, reply = begin_generate(context, request, conversation)
    events = conversation.calls.as_sent(events)
    chat_reply = chat.ChatReply(
        id=conversation.id,
        model=reply.model,
        fields=conversation.fields,
        prompt_ids=request.token_ids,
        spans=reply.spans,
    )
    if request.stream:
        return await streamed(context, chat.to_chunks(events, chat_reply))
    return Response(await chat.to_answer(events, chat_reply), media_type="application/json")


def _conversation(context: RequestContext, request: GenerateRequest) -> Conversation:
    """The chat that a rendered request comes from, as far as its answer must know it: what the
    answer looks like stands among the sampling fields, the rest in `parse_context`."""
    sampling = request.sampling_params
    beside = {name: sampling.get(name) for name in ("n", *ANSWER_FORM)}
    document = {
        "messages": [{"role": "user", "content": ""}],
        **(request.parse_context or {}),
        **{name: value for name, value in beside.items() if value is not None},
        "stream": request.stream or None,
        "stream_options": msgspec.to_builtins(request.stream_options) if request.stream else None,
    }
    chat_request = parse(document, ChatRequest)
    return chat.to_conversation(chat_request, context.services.served, id=completion_id("chatcmpl"))


async def to_answer(events: Events, reply: GenerateReply) -> bytes:
    fold = Fold(reply.num_choices)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
    document = _envelope(reply, [_choice(reply, i, c) for i, c in enumerate(fold.choices)])
    document["usage"] = usage([fold])
    document["prompt_logprobs"] = None
    transfer = reply.sampling.kv_transfer_params
    document["kv_transfer_params"] = None if transfer is None else transfer.answer(reply.id)
    if fold.attention is not None:
        document |= captured_documents(fold.attention, None)
    if fold.prompt_scores is not None and reply.sampling.prompt_logprobs is not None:
        document["prompt_logprobs"] = scores_by_id(fold.prompt_scores)
    if fold.prompt_scores is not None and reply.sampling.prompt_logprob_token_ids is not None:
        scores = fold.prompt_scores[reply.sampling.prompt_logprob_start + 1 :]
        width = len(reply.sampling.prompt_logprob_token_ids)
        document["prompt_token_id_logprobs"] = _array([s for s in scores if s is not None], width)
    if reply.spans is not None:
        document["prompt_token_offsets"] = reply.spans(reply.request.token_ids, continues=False)
    return orjson.dumps(document)


async def to_chunks(events: Events, reply: GenerateReply) -> Chunks:
    options = reply.request.stream_options
    fold = Fold(reply.num_choices)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
            match event:
                case Delta():
                    piece = FoldedChoice(token_ids=event.token_ids, scores=event.scores or [])
                    piece.text = [event.text]
                    yield _event(_envelope(reply, [_choice(reply, event.index, piece)]))
                case Ended():
                    end = FoldedChoice(ended=event)
                    yield _event(_envelope(reply, [_choice(reply, event.index, end)]))
    if options is not None and options.include_usage:
        yield _event({**_envelope(reply, []), "usage": usage([fold])})
    yield DONE


def _array(scores: list[ScoredToken], width: int) -> str:
    """The log-probabilities of the named tokens, float32 [positions, width], as a file of NumPy's
    in base64."""
    values = [[named.logprob for named in scored.named] for scored in scores]
    file = BytesIO()
    np.save(file, np.array(values, np.float32).reshape(len(values), width), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


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


def _choice(reply: GenerateReply, index: int, choice: FoldedChoice) -> dict[str, Any]:
    ended = choice.ended
    document: dict[str, Any] = {
        "index": index,
        "token_ids": choice.token_ids,
        "finish_reason": None if ended is None else ended.reason,
        "stop_reason": None if ended is None else stop_reason(ended),
        "logprobs": None,
    }
    if choice.scores and reply.sampling.logprobs is not None:
        document["logprobs"] = {"content": [_scored(reply, scored) for scored in choice.scores]}
    if reply.tells_mask:
        document["sampling_mask"] = [scored.drawn_among for scored in choice.scores]
    if reply.spans is not None:
        document["token_offsets"] = reply.spans(choice.token_ids, continues=True)
    if reply.request.output_mode == "text":
        document["text"] = "".join(choice.text)
    return document


def _scored(reply: GenerateReply, scored: ScoredToken) -> dict[str, Any]:
    others = alternatives(scored, sampled_first=reply.as_vllm)
    return {**_score(scored.token), "top_logprobs": [_score(score) for score in others]}


def _score(score: TokenScore) -> dict[str, Any]:
    value = logprob(score.logprob)
    rank = None if value == LOWEST else score.rank
    return {"token_id": score.id, "logprob": value, "rank": rank}
