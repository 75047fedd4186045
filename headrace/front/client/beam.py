"""Beam search, on top of one-token continuations with scores.

The `beam_width` most likely partial answers are continued together. An answer that reaches an
end-of-sequence id or a stop id is complete. Answers are ranked by cumulative log-probability /
length ** length_penalty, length counted in generated tokens (Wu et al. 2016, section 7, without the
constant 5, as is usual). The prefix cache makes a continuation cost about one token. Nothing is
sampled and the scores are the model's own: temperature may be 1 (its default) or 0 and changes
nothing; any other, and every filter, penalty or bias, is refused (`inputs.py`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import (
    Delta,
    Ended,
    Event,
    Events,
    Generation,
    ScoredToken,
    Started,
)
from headrace.front.client.limits import RequestBounds
from headrace.front.text.tokenizer import Detokenizer, Tokenizer

MIN_DEADLINE_S = 1e-6
"""What is left of a deadline that has passed: enough to be refused by the core, with its words."""


class Continuer(Protocol):
    """What beam search needs of the engine client."""

    tokenizer: Tokenizer

    @property
    def bounds(self) -> RequestBounds:
        """What bounds a request."""
        ...

    def check(self, generation: Generation) -> None:
        """Refuses a generation that is malformed."""
        ...

    def run(self, generation: Generation, *, trusted: bool) -> AsyncGenerator[Event]:
        """Runs a generation."""
        ...


class Beam(msgspec.Struct, frozen=True):
    """A partial or complete answer."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    scores: tuple[ScoredToken, ...] = ()
    stop_id: int | None = None

    def rank(self, length_penalty: float) -> float:
        """What answers are compared by."""
        return score(self.logprob, len(self.token_ids), length_penalty)


def score(logprob: float, length: int, length_penalty: float) -> float:
    """The score of an answer of `length` tokens."""
    return logprob / math.pow(max(length, 1), length_penalty)


def advance(
    beams: list[Beam], following: list[list[ScoredToken]], *, width: int, stop_ids: frozenset[int]
) -> tuple[list[Beam], list[Beam]]:
    """The `width` best continuations that go on, and the `width` best that are complete.

    following[i]: the best `width` tokens after beams[i] that are no stop ids, and every stop id
    (and maybe others)."""
    candidates = [
        Beam(
            (*beam.token_ids, token.token.id),
            beam.logprob + token.token.logprob,
            (*beam.scores, token),
            token.token.id if token.token.id in stop_ids else None,
        )
        for beam, tokens in zip(beams, following, strict=True)
        for token in tokens
    ]
    candidates.sort(key=lambda beam: -beam.logprob)
    live = [beam for beam in candidates if beam.stop_id is None][:width]
    complete = [beam for beam in candidates if beam.stop_id is not None][:width]
    return live, complete


async def beam_search(engine: Continuer, generation: Generation) -> Events:
    """The `n` best of `beam_width` answers, best first, once they are all complete."""
    engine.check(generation)
    params, bounds = generation.params, engine.bounds
    assert params.beam_width is not None
    stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else bounds.eos_ids)))
    room = bounds.context_tokens - len(generation.prompt_ids)
    steps = room if params.max_tokens is None else min(params.max_tokens, room)
    live, complete = [Beam()], list[Beam]()
    end_at = None if generation.deadline_s is None else time.monotonic() + generation.deadline_s
    yield Started(len(generation.prompt_ids))
    for step in range(steps):
        if end_at is not None:
            left = max(end_at - time.monotonic(), MIN_DEADLINE_S)
            generation = msgspec.structs.replace(generation, deadline_s=left)
        following = await _continuations(engine, generation, live, stop_ids, bounds)
        if step < params.min_tokens:
            following = [[s for s in tokens if s.token.id not in stop_ids] for tokens in following]
        live, ended = advance(live, following, width=params.beam_width, stop_ids=stop_ids)
        complete = _best([*complete, *ended], params, params.beam_width)
        if not live or _settled(live, complete, params, steps):
            break
    unfinished = [] if _settled(live, complete, params, steps) else live
    for index, beam in enumerate(_best([*complete, *unfinished], params, params.n)):
        for event in _events(engine.tokenizer, generation, index, beam):
            yield event


def _best(beams: list[Beam], params: SamplingParams, count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.rank(params.length_penalty))[:count]


def _settled(live: list[Beam], complete: list[Beam], params: SamplingParams, steps: int) -> bool:
    """Whether no live beam can still come among the best: a log-probability only falls, a length
    only grows."""
    assert params.beam_width is not None
    if len(complete) < params.beam_width:
        return False
    worst = complete[-1].rank(params.length_penalty)
    return all(
        max(
            score(beam.logprob, length, params.length_penalty)
            for length in (len(beam.token_ids), steps)
        )
        <= worst
        for beam in live
    )


async def _continuations(
    engine: Continuer,
    generation: Generation,
    beams: list[Beam],
    stop_ids: frozenset[int],
    bounds: RequestBounds,
) -> list[list[ScoredToken]]:
    assert generation.params.beam_width is not None
    wanted = min(generation.params.beam_width + len(stop_ids), bounds.logits_width)
    tasks = [
        asyncio.create_task(_following(engine, generation, beam, wanted, stop_ids))
        for beam in beams
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _following(
    engine: Continuer, generation: Generation, beam: Beam, wanted: int, stop_ids: frozenset[int]
) -> list[ScoredToken]:
    """The tokens that may follow `beam`, with their log-probabilities."""
    # temperature 1 and no other processing: the scores are the model's own.
    params = SamplingParams(
        max_tokens=1, logprobs=wanted, logprob_token_ids=tuple(stop_ids), ignore_eos=True
    )
    prompt = [*generation.prompt_ids, *beam.token_ids]
    step = msgspec.structs.replace(generation, prompt_ids=prompt, params=params)
    async with aclosing(engine.run(step, trusted=True)) as events:
        async for event in events:
            if isinstance(event, Delta) and event.scores:
                top, named = event.scores[0].top, event.scores[0].named
                return list({t.id: ScoredToken(t, top) for t in (*top, *named)}.values())
    return []


def _events(tokenizer: Tokenizer, generation: Generation, index: int, beam: Beam) -> list[Event]:
    params, skip = generation.params, generation.params.skip_special_tokens
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, pieces=generation.pieces)
    keeps_stop = beam.stop_id is None or params.include_stop_str_in_output
    shown = beam.token_ids if keeps_stop else beam.token_ids[:-1]
    text = detokenizer.push(shown) + detokenizer.finish()
    scores = None
    if params.logprobs is not None:
        most = params.logprobs if params.logprobs >= 0 else None
        scores = [ScoredToken(s.token, s.top[:most]) for s in beam.scores]
    return [
        Delta(index=index, text=text, token_ids=list(beam.token_ids), scores=scores),
        Ended(
            index=index,
            reason="length" if beam.stop_id is None else "stop",
            stop=beam.stop_id,
            num_output=len(beam.token_ids),
            cumulative_logprob=beam.logprob,
        ),
    ]
