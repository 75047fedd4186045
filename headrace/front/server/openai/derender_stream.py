"""The derender routes chunk by chunk, as vLLM's clients use them: a chunk of a generation's stream
in, a chunk of the chat's or the completion's stream out, with the state for the next call.

The server keeps nothing between two calls. What came before is generated anew from the ids in the
state, through the stages of a real stream, and what that stream had already said is left out: so
the chunks together say what the direct stream says, wherever the ids are cut. The price is that a
call costs as much as its stream is long (about 14 us a token)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Event, Events, ScoredToken, Started, TokenScore
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import Tally, usage
from headrace.front.server.conversation.pipeline import parsers, prompt_ids
from headrace.front.server.conversation.prompts import prompt_of, prompts_of
from headrace.front.server.conversation.rendering import completion_sampling
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest, parse
from headrace.front.server.conversation.resolved import (
    AnswerFields,
    Conversation,
    SentNames,
    as_sent,
)
from headrace.front.server.conversation.stages import parsed, without_reasoning
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.sse import DONE, Chunks
from headrace.front.server.openai import chat, completions
from headrace.front.server.openai.derender import (
    ChunkChoice,
    DerenderChatChunk,
    DerenderChunk,
    DerenderCompletionChunk,
    StreamState,
)
from headrace.front.server.openai.replay import choice_state, ending, feed, off_loop, scores_of
from headrace.front.text.tokenizer import Tokenizer

_CHAT = SentNames(names={"messages": "chat_request.messages"})


async def derendered_chat_chunk(context: RequestContext, document: Any) -> Response:
    """One chunk of a chat's stream, and the state for the next."""
    body = parse(document, DerenderChatChunk)
    _check(context, body)
    asked = _named(body, body.chat_request or {"messages": [{"role": "user", "content": ""}]})
    request = msgspec.structs.replace(parse(asked, ChatRequest), stream=None, stream_options=None)
    state = _state(body, "chatcmpl")
    conversation = chat.to_conversation(request, context.services.served, id=state.id)
    context.hold_place()
    ids = body.prompt_token_ids or []
    if body.chat_request is not None and not ids:
        with as_sent(_CHAT), as_sent(conversation.sent):
            ids = await prompt_ids(context, conversation.prompt)
    elif body.chat_request is None and parsers(
        context, conversation.form, ids, conversation.params
    ):
        raise InvalidRequest(
            "chat_request: needed beside a chunk where answers are parsed", field="chat_request"
        )
    work = partial(_chat_chunk, context, conversation, body, state, ids)
    return Response(await off_loop(_num_tokens(body), work), media_type="application/json")


async def _chat_chunk(
    context: RequestContext,
    conversation: Conversation,
    body: DerenderChatChunk,
    state: StreamState,
    ids: list[int],
) -> bytes:
    params = msgspec.structs.replace(conversation.params, n=1)
    answers = parsers(context, conversation.form, ids, params)
    marked = context.services.answers.pieces is not None
    pieces = answers[0].pieces if answers and marked else None
    said = _Said(body, num_choices=conversation.params.n)
    events: Events = said.events(context, params, pieces, num_prompt=len(ids))
    if answers is not None:
        events = conversation.calls.as_sent(parsed(events, answers))
        if not conversation.shows_reasoning:
            events = without_reasoning(events)
    fields = _of_one_choice(conversation.fields)
    reply = chat.reply_of(context, replace(conversation, fields=fields), ids)
    reply = replace(reply, created=state.created)
    await said.collect(chat.to_chunks(said.counted(events), reply))
    return said.answer(chat.envelope(reply, []), chat.plain_choice(0, {}), state)


async def derendered_completion_chunk(context: RequestContext, document: Any) -> Response:
    """One chunk of a completion's stream, and the state for the next."""
    body = parse(document, DerenderCompletionChunk)
    _check(context, body)
    asked = _named(body, body.completion_request or {"prompt": ""})
    request = parse(asked, CompletionRequest)
    texts, n = prompts_of(request), request.n or 1
    number = body.generate_chunk.choices[0].index // n if body.generate_chunk.choices else 0
    if body.completion_request is not None and number >= len(texts):
        raise InvalidRequest(
            f"generate_chunk.choices[0].index: of prompt {number}; {len(texts)} prompts given",
            field="generate_chunk.choices[0].index",
        )
    request = msgspec.structs.replace(request, stream=None, stream_options=None, n=1)
    state = _state(body, "cmpl")
    params = completion_sampling(context, request)
    context.hold_place()
    text = texts[min(number, len(texts) - 1)]
    prompt = await prompt_of(context, request, body.prompt_token_ids or text)
    fields = completions.completion_fields(request, context.services.server)
    reply = completions.CompletionReply(
        id=state.id,
        created=state.created,
        model=context.services.model_name(request.model),
        request=request,
        prompts=[prompt],
        fields=_of_one_choice(fields),
    )

    async def work() -> bytes:
        said = _Said(body, num_choices=n * len(texts))
        events = said.counted(said.events(context, params, None, num_prompt=len(prompt.ids)))
        await said.collect(completions.to_chunks(_numbered(events), reply))
        return said.answer(
            completions.envelope(reply, []), completions.plain_choice(reply, 0, 0, ""), state
        )

    return Response(await off_loop(_num_tokens(body), work), media_type="application/json")


class _Said:
    """What the stream says: up to this chunk, which the client has, and with it."""

    def __init__(self, body: DerenderChunk, *, num_choices: int) -> None:
        self._body = body
        self._num_choices = num_choices
        self._tally = Tally(1)
        self._frames: list[bytes] = []
        self._num_earlier: int | None = None

    async def events(
        self,
        context: RequestContext,
        params: SamplingParams,
        pieces: Any,
        *,
        num_prompt: int,
    ) -> AsyncGenerator[Event, None]:
        """The events of the choice. A stage asks for the next one when it has said all that the
        last one gave: so it is known here what had been said before this chunk."""
        body, state = self._body, self._body.stream_state
        answer = choice_state(context, params, pieces)
        if state is None:
            self._num_earlier = 0
        yield Started(num_prompt if body.prompt_tokens is None else body.prompt_tokens)
        tokenizer = context.services.tokenizer
        if state is not None:
            feed(answer, state.output_token_ids)
            if state.finish_reason is not None:
                answer.finish(ending(state.finish_reason, None))
            for event in answer.take(0):
                if isinstance(event, Delta) and params.logprobs is not None:
                    scores = [_unscored(tokenizer, token_id) for token_id in event.token_ids]
                    event = msgspec.structs.replace(event, scores=scores)
                yield event
            self._num_earlier = len(self._frames)
        for choice in self._choices_left():
            feed(answer, choice.token_ids)
            if choice.finish_reason is not None:
                answer.finish(ending(choice.finish_reason, choice.stop_reason))
            for event in answer.take(0):
                if isinstance(event, Delta):
                    entries = scores_of(tokenizer, choice.logprobs)
                    event = msgspec.structs.replace(event, scores=entries)
                yield event

    def _choices_left(self) -> list[ChunkChoice]:
        """The choice of this chunk, unless its stream had ended before."""
        state = self._body.stream_state
        ended = state is not None and state.finish_reason is not None
        return [] if ended else self._body.generate_chunk.choices

    async def counted(self, events: Events) -> AsyncGenerator[Event, None]:
        """The events, counted for the usage."""
        async with aclosing(events):
            async for event in events:
                self._tally.take(event)
                yield event

    async def collect(self, chunks: Chunks) -> None:
        """Runs the stream to the end of this chunk."""
        async with aclosing(chunks):
            async for frame in chunks:
                if frame != DONE:
                    self._frames.append(frame)

    def answer(self, envelope: dict[str, Any], silent: dict[str, Any], state: StreamState) -> bytes:
        """The body of the answer. `silent`: a choice that says nothing."""
        chunk = self._body.generate_chunk
        new = [] if self._num_earlier is None else self._frames[self._num_earlier :]
        parts: list[dict[str, Any]] = []
        for frame in new:
            parts += orjson.loads(frame.removeprefix(b"data: "))["choices"]
        document: dict[str, Any] = {**envelope, "choices": []}
        for choice in chunk.choices:
            whole = silent
            for one in parts:
                whole = joined(whole, one)
            document["choices"] = [{**whole, "index": choice.index}]
            state = msgspec.structs.replace(
                state,
                output_token_ids=[*state.output_token_ids, *choice.token_ids],
                finish_reason=state.finish_reason or choice.finish_reason,
            )
        if chunk.usage is not None:
            document["usage"] = self._usage()
        return orjson.dumps({"chunk": document, "stream_state": msgspec.to_builtins(state)})

    def _usage(self) -> dict[str, Any]:
        """The chunk's, with the prompt's length as it was told here; of one choice also how much
        was reasoning."""
        usage_sent, body = self._body.generate_chunk.usage, self._body
        assert usage_sent is not None
        prompt = usage_sent.prompt_tokens if body.prompt_tokens is None else body.prompt_tokens
        document: dict[str, Any] = usage([self._tally]) | {
            "prompt_tokens": prompt,
            "completion_tokens": usage_sent.completion_tokens,
            "total_tokens": prompt + usage_sent.completion_tokens,
            "prompt_tokens_details": msgspec.to_builtins(usage_sent.prompt_tokens_details),
        }
        if self._num_choices > 1:
            document["completion_tokens_details"] = None
        return document


def joined(first: Any, second: Any) -> Any:
    """Two chunks' values as one: texts and lists one behind the other, objects field by field;
    fragments of one call become one."""
    if first is None or second is None:
        return second if first is None else first
    match first:
        case str():
            return first + second
        case dict():
            return first | {name: joined(first.get(name), second[name]) for name in second}
        case list():
            whole = list(first)
            for value in second:
                index = value.get("index") if isinstance(value, dict) else None
                if whole and index is not None and whole[-1]["index"] == index:
                    whole[-1] = joined(whole[-1], value)
                else:
                    whole.append(value)
            return whole
        case _:
            return second


async def _numbered(events: Events) -> AsyncGenerator[tuple[int, Event], None]:
    async with aclosing(events):
        async for event in events:
            yield 0, event


def _of_one_choice(fields: AnswerFields) -> AnswerFields:
    return replace(fields, num_choices=1, with_usage=False, continuous_usage=False)


def _unscored(tokenizer: Tokenizer, token_id: int) -> ScoredToken:
    """A token whose score was told before: its text counts for the places of later ones."""
    piece = tokenizer.pieces[token_id]
    text, data = (piece, piece.encode()) if isinstance(piece, str) else ("", piece)
    return ScoredToken(TokenScore(token_id, 0.0, text, data), [])


def _state(body: DerenderChunk, kind: str) -> StreamState:
    if body.stream_state is not None:
        return body.stream_state
    label = body.generate_chunk.request_id or completion_id(kind)
    return StreamState(id=label, created=int(time.time()))


def _named(body: DerenderChunk, asked: dict[str, Any]) -> dict[str, Any]:
    return asked if body.model is None else {"model": body.model} | asked


def _num_tokens(body: DerenderChunk) -> int:
    state, choices = body.stream_state, body.generate_chunk.choices
    earlier = 0 if state is None else len(state.output_token_ids)
    scored = sum(len(c.logprobs.content) for c in choices if c.logprobs is not None)
    ids = sum(len(choice.token_ids) for choice in choices)
    return earlier + ids + scored + len(body.prompt_token_ids or ())


def _check(context: RequestContext, body: DerenderChunk) -> None:
    """What no stream here can have been is refused before any work is done for it."""
    length = context.services.text.max_model_len
    state, choices = body.stream_state, body.generate_chunk.choices
    earlier = [] if state is None else state.output_token_ids
    new = [token_id for choice in choices for token_id in choice.token_ids]
    scored = [entry for c in choices if c.logprobs is not None for entry in c.logprobs.content]
    check = context.services.tokenizer.check_ids
    for field, ids, count in (
        ("prompt_token_ids", body.prompt_token_ids or (), 0),
        ("stream_state.output_token_ids", earlier, len(new)),
        ("generate_chunk.choices[0].token_ids", new, 0),
        ("generate_chunk.choices[0].logprobs", [entry.token_id for entry in scored], 0),
    ):
        if len(ids) + count > length:
            raise InvalidRequest(
                f"{field}: {len(ids) + count} tokens with this chunk's; allowed: {length}",
                field=field,
            )
        check(ids, field=field)
    for entry in scored:
        check([top.token_id for top in entry.top_logprobs], field="generate_chunk.choices[0]")
