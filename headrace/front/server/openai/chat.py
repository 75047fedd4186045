"""POST /v1/chat/completions: request to generation, events to chunks, events to the full answer.

The chunk of a plain delta is the hot path: everything but the text is encoded once per choice
(budget: 3 us a chunk). Reasoning and tool calls are parsed before (conversation/stages.py); here
they only get their shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response

from headrace.front.client.events import Delta, Ended, Events, ScoredToken, Started
from headrace.front.server.conversation.calls import (
    CustomBegin,
    CustomInput,
    FunctionArguments,
    FunctionBegin,
)
from headrace.front.server.conversation.context import RequestContext, ServedModel
from headrace.front.server.conversation.fold import (
    Fold,
    FoldedCall,
    FoldedChoice,
    Spans,
    Tally,
    captured_documents,
    chat_logprobs,
    finish_reason,
    request_metrics,
    scores_by_id,
    stop_reason,
    usage,
)
from headrace.front.server.conversation.pipeline import begin, streamed
from headrace.front.server.conversation.prompts import spans
from headrace.front.server.conversation.request import ChatRequest, parse
from headrace.front.server.conversation.resolved import AnswerFields, Conversation, resolved
from headrace.front.server.conversation.stages import ParsedDelta, parts_of
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.sse import DONE, Chunks
from headrace.front.server.openai.keep_chat import kept
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)
from headrace.front.text.threads import TEXT_THREADS


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """What all chunks of one answer share. `fields`: what it shows beside its text."""

    id: str
    model: str
    fields: AnswerFields
    prompt_ids: list[int]
    prompt_text: str | None = None
    spans: Spans | None = None
    created: int = field(default_factory=lambda: int(time.time()))


Answered = tuple[ChatReply, Events]


def to_conversation(request: ChatRequest, served: ServedModel, *, id: str) -> Conversation:
    """The request, resolved."""
    return resolved(request, served, id=id)


async def post_chat(context: RequestContext, document: Any) -> Response:
    """POST /v1/chat/completions."""
    conversation = to_conversation(
        parse(document, ChatRequest), context.services.served, id=completion_id("chatcmpl")
    )
    ids, events = await begin(context, conversation)
    reply = reply_of(context, conversation, ids)
    if reply.fields.stores:
        events = kept(context, events, reply, document, to_answer)
    if reply.fields.streams:
        return await streamed(context, to_chunks(events, reply), pads=reply.fields.pads)
    return Response(await to_answer(events, reply), media_type="application/json")


async def answered(context: RequestContext, conversation: Conversation) -> Answered:
    """One conversation: what its chunks share, and the events of its answer."""
    ids, events = await begin(context, conversation)
    return reply_of(context, conversation, ids), events


def reply_of(context: RequestContext, conversation: Conversation, ids: list[int]) -> ChatReply:
    """What the chunks share, with what is asked of the prompt (these ids) and of its tokens."""
    tokenizer = context.services.tokenizer
    return ChatReply(
        id=conversation.id,
        model=conversation.model,
        fields=conversation.fields,
        prompt_ids=ids,
        prompt_text=(
            tokenizer.decode(ids, skip_special_tokens=False)
            if conversation.fields.prompt_text
            else None
        ),
        spans=partial(spans, tokenizer) if conversation.fields.token_offsets else None,
    )


async def to_chunks(events: Events, reply: ChatReply) -> Chunks:
    """The stream: a role chunk per choice, deltas, a finish chunk per choice, the usage if asked
    for, the end mark."""
    fields = reply.fields
    tally = Tally(fields.num_choices)
    plain = not (fields.scores or fields.token_ids or fields.continuous_usage or fields.as_vllm)
    held: dict[int, dict[str, Any]] = {}  # the last delta of a choice that waits for its end
    extras: dict[str, Any] = {"usage": None} if fields.with_usage else {}
    frames = [_around_text(reply, index, extras) for index in range(tally.num_choices)]
    silent = set(range(tally.num_choices if fields.offers_tools else 0))
    async with aclosing(events):
        async for event in events:
            tally.take(event)
            if isinstance(event, Delta | Ended) and _speaks(event, silent):
                silent.remove(event.index)
                yield _event(reply, [_role(reply, event.index, of=event)], extras)
            if fields.continuous_usage:
                extras = {"usage": usage([tally])}
            match event:
                case ParsedDelta() if plain:
                    head, tail = frames[event.index]
                    for part in event.parts:
                        if isinstance(part, Content):
                            yield head + orjson.dumps(part.text) + tail
                        elif shown := part_delta(part):
                            yield _event(reply, [plain_choice(event.index, shown)], extras)
                case Delta() if plain:
                    if event.text:
                        head, tail = frames[event.index]
                        yield head + orjson.dumps(event.text) + tail
                case Delta():
                    choices = _deltas(reply, event)
                    if event.index in held:
                        choices.insert(0, held.pop(event.index))
                    if fields.as_vllm and event.last:
                        held[event.index] = choices.pop()
                    for choice in choices:
                        yield _event(reply, [choice], extras)
                case Ended():
                    last = held.pop(event.index, None)
                    yield _event(reply, [_end(event, last)], extras)
                case Started():
                    if not fields.offers_tools:
                        for index in range(tally.num_choices):
                            yield _event(reply, [_role(reply, index)], extras)
                    for index in range(tally.num_choices if fields.echo else 0):
                        echoed = plain_choice(index, {"content": fields.echo})
                        yield _event(reply, [echoed], extras)
    if fields.with_usage:
        facts = {"metrics": request_metrics(tally.first_ended)} if fields.metrics else {}
        yield _event(reply, [], {"usage": usage([tally]), **facts})
    yield DONE


def envelope(reply: ChatReply, choices: list[dict[str, Any]]) -> dict[str, Any]:
    tier = reply.fields.service_tier
    head = {"id": reply.id, "object": "chat.completion.chunk", "created": reply.created}
    tier_field = {} if tier is None else {"service_tier": tier}
    return {**head, "model": reply.model, **tier_field, "choices": choices}


def _around_text(reply: ChatReply, index: int, extras: dict[str, Any]) -> tuple[bytes, bytes]:
    """The bytes of a plain delta's chunk before its text, and those behind it."""
    chunk = _event(reply, [plain_choice(index, {"content": ""})], extras)
    head, _, tail = chunk.rpartition(b'""')
    return head, tail


def _event(reply: ChatReply, choices: list[dict[str, Any]], extras: dict[str, Any]) -> bytes:
    """One chunk; `told` is what it says beside its choices."""
    return b"data: " + orjson.dumps(envelope(reply, choices) | extras) + b"\n\n"


def _speaks(event: Delta | Ended, silent: Collection[int]) -> bool:
    """Whether a choice that waits for its first words gets them now."""
    if event.index not in silent:
        return False
    return isinstance(event, Ended) or any(part_delta(part) for part in parts_of(event))


def _role(reply: ChatReply, index: int, *, of: Delta | Ended | None = None) -> dict[str, Any]:
    """The first chunk of a choice. Where tools are offered it waits for the first words: a message
    that begins with a call or with reasoning has no content yet (null)."""
    is_other = isinstance(of, Delta) and not isinstance(parts_of(of)[0], Content)
    content = None if is_other else ""
    choice = plain_choice(index, {"role": "assistant", "content": content})
    if reply.fields.token_ids:
        choice["prompt_token_ids"] = reply.prompt_ids
    if reply.prompt_text is not None:
        choice["prompt_text"] = reply.prompt_text
    return choice


def part_delta(part: Part) -> dict[str, Any] | None:
    """The `delta` of one part. The first fragment of a call has its id and name, later ones only
    index and arguments: clients join the texts of all fragments."""
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


def plain_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _deltas(reply: ChatReply, event: Delta) -> list[dict[str, Any]]:
    """A chunk's choice per part; the first one carries the scores and the ids."""
    if isinstance(event, ParsedDelta):
        shown = [delta for part in event.parts if (delta := part_delta(part))] or [{}]
    else:
        shown = [{"content": event.text}]
    choices = [plain_choice(event.index, delta) for delta in shown]
    if event.scores:
        choices[0]["logprobs"] = _scored(reply, event.scores)
    if reply.fields.token_ids:
        choices[0]["token_ids"] = event.token_ids
    return choices


def _scored(reply: ChatReply, scores: list[ScoredToken]) -> dict[str, object]:
    fields = reply.fields
    return chat_logprobs(scores, as_id=fields.tokens_as_ids, sampled_first=fields.as_vllm)


def _end(event: Ended, last: dict[str, Any] | None) -> dict[str, Any]:
    choice = plain_choice(event.index, {}) if last is None else last
    return choice | {"finish_reason": finish_reason(event), "stop_reason": stop_reason(event)}


async def to_answer(events: Events, reply: ChatReply) -> bytes:
    """The full answer: the fold of the same events."""
    fold = Fold(reply.fields.num_choices)
    async with aclosing(events):
        async for event in events:
            fold.take(event)
    size = 0
    if reply.spans is not None:
        size = 2 * sum(len(choice.token_ids) for choice in fold.choices) + 2 * len(reply.prompt_ids)
    document = await TEXT_THREADS.run(size, partial(_document, reply, fold))
    if fold.attention is not None:
        document |= await asyncio.to_thread(
            captured_documents, fold.attention, reply.fields.attention_dtype
        )
    return orjson.dumps(document)


def _document(reply: ChatReply, fold: Fold) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice_of(reply, fold, index) for index in range(fold.num_choices)],
        "usage": usage([fold]),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": reply.fields.transferred(reply.id),
    }
    if reply.fields.metrics:
        document["metrics"] = request_metrics(fold.first_ended)
    if reply.fields.service_tier is not None:
        document["service_tier"] = reply.fields.service_tier
    if fold.prompt_scores is not None and reply.fields.prompt_scores:
        document["prompt_logprobs"] = scores_by_id(fold.prompt_scores)
    if reply.fields.token_ids:
        document["prompt_token_ids"] = reply.prompt_ids
    if reply.prompt_text is not None:
        document["prompt_text"] = reply.prompt_text
    if reply.spans is not None:
        document["prompt_token_offsets"] = reply.spans(reply.prompt_ids, continues=False)
    return document


def _message(choice: FoldedChoice, *, echo: str) -> dict[str, Any]:
    """The message: content null where there are only calls; reasoning and calls only where there
    are any."""
    content = echo + "".join(choice.text)
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


def _call(call: FoldedCall) -> dict[str, Any]:
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
    document: dict[str, Any] = {
        "index": index,
        "message": _message(choice, echo=reply.fields.echo),
        "logprobs": _scored(reply, choice.scores) if reply.fields.scores else None,
        "finish_reason": finish_reason(choice.ended),
        "stop_reason": stop_reason(choice.ended),
        "token_ids": None,
    }
    if reply.fields.token_ids:
        document["token_ids"] = choice.token_ids
    if reply.spans is not None:
        document["token_offsets"] = reply.spans(choice.token_ids, continues=True)
    return document
