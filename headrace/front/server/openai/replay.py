"""Generated ids through the detokenizer and the stop strings of a generation, as its events, off
the event loop where there are many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.wire.request import Finished, SamplingParams, StopRules
from headrace.front.client.events import (
    Delta,
    Events,
    PromptScored,
    ScoredToken,
    Started,
    TokenScore,
)
from headrace.front.client.outputs import ChoiceState
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.openai.derender import (
    DerenderRequest,
    PromptScores,
    ScoredEntry,
    TokenScores,
    TopToken,
)
from headrace.front.text.threads import INLINE_CHARS, TEXT_THREADS, checkpoint
from headrace.front.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 16
"""A token here is as much work as so many characters to a tokenizer."""
TOKENS_BETWEEN_CHECKS = 256


async def off_loop(num_tokens: int, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
    """The result of work that waits for nothing; in a thread where there is much of it."""
    size = CHARS_PER_TOKEN * num_tokens
    if size < INLINE_CHARS:
        return await work()
    return await TEXT_THREADS.run(size, lambda: asyncio.run(work()))


async def whole_events(
    context: RequestContext,
    ids: list[int],
    body: DerenderRequest,
    params: SamplingParams,
    pieces: Mapping[int, str | bytes] | None = None,
) -> Events:
    """The events that the generation had, merged per choice."""
    tokenizer = context.services.tokenizer
    generated = body.response
    yield Started(len(ids) if body.prompt_tokens is None else body.prompt_tokens)
    cached = generated.usage.prompt_tokens_details.cached_tokens
    if generated.prompt_logprobs is not None:
        yield PromptScored([_prompt_score(tokenizer, entry) for entry in generated.prompt_logprobs])
    for choice in sorted(generated.choices, key=lambda choice: choice.index):
        answer = choice_state(context, params, pieces, index=choice.index)
        feed(answer, choice.token_ids)
        answer.finish(ending(choice.finish_reason, choice.stop_reason, num_cached=cached))
        for event in answer.take(0):
            if isinstance(event, Delta):
                scores = scores_of(tokenizer, choice.logprobs)
                event = msgspec.structs.replace(event, token_ids=choice.token_ids, scores=scores)
            yield event


def choice_state(
    context: RequestContext,
    params: SamplingParams,
    pieces: Mapping[int, str | bytes] | None,
    *,
    index: int = 0,
) -> ChoiceState:
    """A choice that takes in ids that were generated before, without scores."""
    eos = () if params.ignore_eos else context.services.text.eos_ids
    return ChoiceState(
        index=index,
        tokenizer=context.services.tokenizer,
        params=msgspec.structs.replace(params, logprobs=None, prompt_logprobs=None),
        stop=StopRules(max_tokens=0, stop_ids=(*params.stop_token_ids, *eos)),
        pieces=pieces,
    )


def feed(answer: ChoiceState, ids: Sequence[int]) -> None:
    """Takes in these ids, up to a stop string."""
    for number, token_id in enumerate(ids):
        if answer.done or answer.add_token(token_id, None):
            break
        if number % TOKENS_BETWEEN_CHECKS == 0:
            checkpoint()


def ending(reason: str, stop: str | int | None, *, num_cached: int = 0) -> Finished:
    """The end as the core tells it."""
    stop_id = stop if isinstance(stop, int) else None
    return Finished(id=0, reason=reason, stop_id=stop_id, num_cached=num_cached)


def scores_of(tokenizer: Tokenizer, scores: TokenScores | None) -> list[ScoredToken] | None:
    """The scores of a choice, with the texts of their tokens."""
    if scores is None:
        return None
    return [
        ScoredToken(_score(tokenizer, entry), [_score(tokenizer, t) for t in entry.top_logprobs])
        for entry in scores.content
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
