"""POST /v1/chat/completions: request to generation, events to chunks, events to the full answer.

The chunk of a plain delta is the hot path: everything but the text is encoded once per choice (budget: 3 us a chunk).
Reasoning and tool calls are parsed before (parsed.py); here they only get their shape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.base.errors import InvalidRequest
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Delta, Ended, Events, Started
from headrace.front.server.openai.attention import attention_document
from headrace.front.server.openai.custom import CustomBegin, CustomInput
from headrace.front.server.openai.fold import (
    Call,
    Choice,
    Fold,
    Spans,
    Tally,
    chat_logprobs,
    finish_reason,
    scores_by_id,
    stop_reason,
    usage,
)
from headrace.front.server.openai.legacy import FunctionArguments, FunctionBegin
from headrace.front.server.openai.sampling import sampling_params
from headrace.front.server.openai.schema import ChatRequest
from headrace.front.server.parsed import ParsedDelta
from headrace.front.server.sse import DONE, Chunks
from headrace.front.server.structured import tool_format, unfinished_text
from headrace.front.text.parsing.parser import AnswerFormat, OutputParser, schemas_of
from headrace.front.text.parsing.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """What all chunks of one answer share."""

    id: str
    model: str
    request: ChatRequest
    prompt_ids: list[int]
    prompt_text: str | None = None
    spans: Spans | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def to_params(
    request: ChatRequest, *, defaults: Mapping[str, float | int], max_n: int
) -> SamplingParams:
    """The sampling side of the request; InvalidRequest where fields contradict each other."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "top_logprobs: allowed only together with logprobs: true", field="top_logprobs"
        )
    if request.tool_choice is not None and not request.tools:
        raise InvalidRequest("tool_choice: allowed only together with tools", field="tool_choice")
    limit = request.max_completion_tokens
    wants_scores = request.logprobs or request.logprob_token_ids
    return sampling_params(
        request,
        defaults=defaults,
        max_n=max_n,
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if wants_scores else None,
    )


def to_parser(
    request: ChatRequest, answers: AnswerFormat, *, prompt_tail: str
) -> OutputParser | None:
    """A parser for one choice; None where the text is the content. `prompt_tail` is how the prompt ends."""
    offered = request.tools is not None and request.tool_choice != "none"
    return tool_format(request, answers).parser(
        prompt_tail=prompt_tail,
        unfinished=unfinished_text(request),
        schemas=schemas_of(request.tools or []) if offered else None,
        only_one_call=request.parallel_tool_calls is False,
    )


async def to_chunks(events: Events, reply: ChatReply) -> Chunks:
    """The stream: a role chunk per choice, deltas, a finish chunk per choice, the usage if asked for, the end mark."""
    request = reply.request
    options = request.stream_options
    with_usage = options is not None and options.include_usage
    continuous = options is not None and options.continuous_usage_stats
    tally = Tally(request.n or 1)
    by_token = request.logprobs or request.logprob_token_ids or request.return_token_ids
    plain = not (by_token or continuous)
    told: dict[str, Any] = {"usage": None} if with_usage else {}
    frames = [_around_text(reply, index, told) for index in range(tally.num_choices)]
    async with aclosing(events):
        async for event in events:
            tally.take(event)
            if continuous:
                told = {"usage": usage([tally])}
            match event:
                case ParsedDelta() if plain:
                    head, tail = frames[event.index]
                    for part in event.parts:
                        if isinstance(part, Content):
                            yield head + orjson.dumps(part.text) + tail
                        elif shown := part_delta(part):
                            yield _event(reply, [_plain_choice(event.index, shown)], told)
                case Delta() if plain:
                    if event.text:
                        head, tail = frames[event.index]
                        yield head + orjson.dumps(event.text) + tail
                case Delta():
                    for choice in _deltas(reply, event):
                        yield _event(reply, [choice], told)
                case Ended():
                    yield _event(reply, [_end(event)], told)
                case Started():
                    for index in range(tally.num_choices):
                        yield _event(reply, [_role(reply, index)], told)
    if with_usage:
        yield _event(reply, [], {"usage": usage([tally])})
    yield DONE


def _envelope(reply: ChatReply, choices: list[dict[str, Any]]) -> dict[str, Any]:
    tier = reply.request.service_tier
    head = {"id": reply.id, "object": "chat.completion.chunk", "created": reply.created}
    told = {} if tier is None else {"service_tier": tier}
    return {**head, "model": reply.model, **told, "choices": choices}


def _around_text(reply: ChatReply, index: int, told: dict[str, Any]) -> tuple[bytes, bytes]:
    """The bytes of a plain delta's chunk before its text, and those behind it."""
    chunk = _event(reply, [_plain_choice(index, {"content": ""})], told)
    head, _, tail = chunk.rpartition(b'""')
    return head, tail


def _event(reply: ChatReply, choices: list[dict[str, Any]], told: dict[str, Any]) -> bytes:
    """One chunk; `told` is what it says beside its choices."""
    return b"data: " + orjson.dumps(_envelope(reply, choices) | told) + b"\n\n"


def _role(reply: ChatReply, index: int) -> dict[str, Any]:
    choice = _plain_choice(index, {"role": "assistant", "content": ""})
    if reply.request.return_token_ids:
        choice["prompt_token_ids"] = reply.prompt_ids
    if reply.prompt_text is not None:
        choice["prompt_text"] = reply.prompt_text
    return choice


def part_delta(part: Part) -> dict[str, Any] | None:
    """The `delta` of one part. The first fragment of a call has its id and name, later ones only index and arguments:
    clients join the texts of all fragments."""
    match part:
        case CustomBegin():
            custom = {"name": part.name, "input": ""}
            call = {"index": part.index, "id": part.id, "type": "custom", "custom": custom}
            return {"tool_calls": [call]}
        case CustomInput():
            custom = {"input": part.text}
            return {"tool_calls": [{"index": part.index, "custom": custom}]}
        case FunctionBegin():
            return {"function_call": {"name": part.name, "arguments": ""}}
        case FunctionArguments():
            return {"function_call": {"arguments": part.text}}
        case Content():
            return {"content": part.text}
        case Reasoning():
            return {"reasoning": part.text, "reasoning_content": part.text}
        case CallBegin():
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        case CallEnd():
            return None


def _plain_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _deltas(reply: ChatReply, event: Delta) -> list[dict[str, Any]]:
    """A chunk's choice per part; the first one carries the scores and the ids."""
    if isinstance(event, ParsedDelta):
        shown = [delta for part in event.parts if (delta := part_delta(part))] or [{}]
    else:
        shown = [{"content": event.text}]
    found = [_plain_choice(event.index, delta) for delta in shown]
    as_id = bool(reply.request.return_tokens_as_token_ids)
    if event.scores:
        found[0]["logprobs"] = chat_logprobs(event.scores, as_id=as_id)
    if reply.request.return_token_ids:
        found[0]["token_ids"] = event.token_ids
    return found


def _end(event: Ended) -> dict[str, Any]:
    choice = _plain_choice(event.index, {})
    return choice | {"finish_reason": finish_reason(event), "stop_reason": stop_reason(event)}


async def to_answer(events: Events, reply: ChatReply) -> bytes:
    """The full answer: the fold of the same events."""
    fold = Fold(reply.request.n or 1)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
    document: dict[str, Any] = {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice_of(reply, fold, index) for index in range(fold.num_choices)],
        "usage": usage([fold]),
    }
    if reply.request.service_tier is not None:
        document["service_tier"] = reply.request.service_tier
    if fold.prompt_scores is not None and reply.request.prompt_logprobs is not None:
        document["prompt_logprobs"] = scores_by_id(fold.prompt_scores)
    if fold.attention is not None:
        document["attn_capture_data"] = await asyncio.to_thread(
            attention_document, fold.attention, reply.request.attn_capture_dtype
        )
    if reply.request.return_token_ids:
        document["prompt_token_ids"] = reply.prompt_ids
    if reply.prompt_text is not None:
        document["prompt_text"] = reply.prompt_text
    if reply.spans is not None:
        document["prompt_token_offsets"] = reply.spans(reply.prompt_ids, continues=False)
    return orjson.dumps(document)


def _message(choice: Choice) -> dict[str, Any]:
    """The message: content null where there are only calls; reasoning and calls only where there are any."""
    content = "".join(choice.text)
    only_calls = not content and bool(choice.calls)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if only_calls else content,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls and choice.calls[0].legacy:
        message["function_call"] = _call(choice.calls[0])["function"]
    elif choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    arguments = "".join(call.arguments)
    if call.custom:
        custom = {"name": call.name, "input": arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def choice_of(reply: ChatReply, fold: Fold, index: int) -> dict[str, Any]:
    """One choice of the full answer."""
    choice = fold.choices[index]
    assert choice.ended is not None, f"choice {index} of {reply.id} never ended"
    as_id = bool(reply.request.return_tokens_as_token_ids)
    wants_scores = reply.request.logprobs or reply.request.logprob_token_ids
    found: dict[str, Any] = {
        "index": index,
        "message": _message(choice),
        "logprobs": chat_logprobs(choice.scores, as_id=as_id) if wants_scores else None,
        "finish_reason": finish_reason(choice.ended),
        "stop_reason": stop_reason(choice.ended),
    }
    if reply.request.return_token_ids:
        found["token_ids"] = choice.token_ids
    if reply.spans is not None:
        found["token_offsets"] = reply.spans(choice.token_ids, continues=True)
    return found
