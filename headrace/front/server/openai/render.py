"""The render and derender routes: render -> generate -> derender is what the direct route does.

Derendering runs the generated ids through the same detokenizer, stop strings, parsers and fold as a
generation, so that the answers cannot differ. All of it is there at once and waits for nothing: it
runs in a thread where there is much, and ends when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import Finished, SamplingParams, StopRules
from headrace.front.client.events import (
    Delta,
    Event,
    Events,
    PromptScored,
    ScoredToken,
    Started,
    TokenScore,
)
from headrace.front.client.outputs import ChoiceState
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
    GeneratedChoice,
    PromptScores,
    ScoredEntry,
    TopToken,
    derender_chat,
    derender_completion,
)
from headrace.front.text.threads import INLINE_CHARS, TEXT_THREADS, checkpoint
from headrace.front.text.tokenizer import Tokenizer

MAX_DERENDERED_TOKENS = 1 << 18
"""Of all choices together and their scores, where the model's context is not longer."""
CHARS_PER_TOKEN = 16
"""A token here is as much work as so many characters to a tokenizer."""
TOKENS_BETWEEN_CHECKS = 256


async def post_render_chat(context: RequestContext, document: Any) -> Response:
    """POST /v1/chat/completions/render."""
    return json_response(await render_chat(context, document))


async def post_render_completion(context: RequestContext, document: Any) -> Response:
    """POST /v1/completions/render: one generate request per prompt."""
    return json_response(await render_completion(context, document))


async def post_derender_chat(context: RequestContext, document: Any) -> Response:
    """POST /v1/chat/completions/derender: generated ids as a chat completion."""
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
        answer = await _off_loop(_num_tokens(body), work)
    return Response(answer, media_type="application/json")


async def _chat_answer(
    context: RequestContext, conversation: Conversation, body: DerenderRequest, ids: list[int]
) -> bytes:
    params = conversation.params
    _check_ids(context, body)
    answers = parsers(context, conversation.form, ids, params)
    marked = context.services.answers.pieces is not None
    pieces = answers[0].pieces if answers and marked else None
    events: Events = _events(context, ids, body, params, pieces)
    if answers is not None:
        events = conversation.calls.as_sent(parsed(events, answers))
        if not conversation.shows_reasoning:
            events = without_reasoning(events)
    return await chat.to_answer(events, chat.reply_of(context, conversation, ids))


async def post_derender_completion(context: RequestContext, document: Any) -> Response:
    """POST /v1/completions/derender: generated ids of one prompt as a text completion; in vLLM's
    body of several."""
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
            events.append(_events(context, prompt.ids, body, params))
        return await completions.to_answer(joined(events), reply)

    with as_sent(sent):
        encoded = await _off_loop(sum(map(_num_tokens, bodies)), answer)
    return Response(encoded, media_type="application/json")


async def _off_loop(num_tokens: int, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
    """The result of work that waits for nothing; in a thread where there is much of it."""
    size = CHARS_PER_TOKEN * num_tokens
    if size < INLINE_CHARS:
        return await work()
    return await TEXT_THREADS.run(size, lambda: asyncio.run(work()))


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


async def _events(
    context: RequestContext,
    ids: list[int],
    body: DerenderRequest,
    params: SamplingParams,
    pieces: Mapping[int, str | bytes] | None = None,
) -> Events:
    """The events that the generation had, merged per choice."""
    services = context.services
    tokenizer = services.tokenizer
    eos = () if params.ignore_eos else services.text.eos_ids
    stop_ids = (*params.stop_token_ids, *eos)
    generated = body.response
    yield Started(len(ids) if body.prompt_tokens is None else body.prompt_tokens)
    cached = generated.usage.prompt_tokens_details.cached_tokens
    if generated.prompt_logprobs is not None:
        yield PromptScored([_prompt_score(tokenizer, entry) for entry in generated.prompt_logprobs])
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
    answer = ChoiceState(
        index=choice.index,
        tokenizer=tokenizer,
        params=params,
        stop=StopRules(max_tokens=len(ids), stop_ids=stop_ids),
        pieces=pieces,
    )
    for number, token_id in enumerate(ids):
        if answer.add_token(token_id, None):
            break
        if number % TOKENS_BETWEEN_CHECKS == 0:
            checkpoint()
    answer.finish(Finished(id=0, reason=choice.finish_reason, stop_id=stop_id, num_cached=cached))
    return answer.take(0)


def _scores(tokenizer: Tokenizer, choice: GeneratedChoice) -> list[ScoredToken] | None:
    if choice.logprobs is None:
        return None
    return [
        ScoredToken(_score(tokenizer, entry), [_score(tokenizer, t) for t in entry.top_logprobs])
        for entry in choice.logprobs.content
    ]


def _prompt_score(tokenizer: Tokenizer, scores: PromptScores) -> ScoredToken | None:
    if scores is None:
        return None
    token, *others = [
        _token_score(tokenizer, int(token_id), one.logprob, one.rank)
        for token_id, one in scores.items()
    ]
    return ScoredToken(token=token, top=others)


def _score(tokenizer: Tokenizer, entry: ScoredEntry | TopToken) -> TokenScore:
    return _token_score(tokenizer, entry.token_id, entry.logprob, entry.rank)


def _token_score(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None
) -> TokenScore:
    piece = tokenizer.pieces[token_id]
    text, data = (piece, piece.encode()) if isinstance(piece, str) else ("", piece)
    return TokenScore(token_id, logprob, text, data, rank)
