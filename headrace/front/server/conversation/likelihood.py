"""What a generative model expects next: log-probabilities of named tokens behind a prompt, out of
the whole vocabulary.

Scores of generative models are made of these (generative.py, judge.py, decisions.py). The prompts
of one request share its place in the queue and its deadline, as pooled texts do; nothing is run
before all were checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.admission_retry import run_admitted
from headrace.front.client.events import Delta, Ended, Generation
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.stages import measured
from headrace.front.server.http.auth import completion_id

MAX_NAMED = 128


Float64 = npt.NDArray[np.float64]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the tokens that may follow it."""

    prompt_ids: list[int]
    token_ids: tuple[int, ...]
    media: tuple[MediaInput, ...] = ()


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of each token that was asked for."""

    values: Float64
    num_prompt: int
    num_cached: int

    @property
    def shares(self) -> Float64:
        """The probabilities of the tokens among themselves: their softmax."""
        chances = np.exp(self.values - self.values.max())
        shares: Float64 = chances / chances.sum()
        return shares


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """What all prompts of one request share."""

    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


async def expected(
    context: RequestContext, asked: Sequence[Asked], manner: Manner
) -> list[Expected]:
    """One answer per prompt, in order."""
    label = completion_id("score")
    context.hold("tokens", sum(len(each.prompt_ids) + 1 for each in asked))
    services = context.services

    async def named(number: int, each: Asked, tokens: tuple[int, ...]) -> tuple[list[float], int]:
        generation = Generation(
            prompt_ids=each.prompt_ids,
            media=each.media,
            params=_one_token(tokens),
            label=f"{label}-{number}",
            external_id=context.external_id,
            tenant=context.tenant,
            priority=manner.priority,
            deadline_s=context.deadline_s(manner.timeout_s),
            cache_salt=manner.cache_salt,
        )
        values: list[float] = []
        num_cached = 0
        async with aclosing(
            measured(services.engine.generate(generation), context, generation)
        ) as events:
            async for event in events:
                if isinstance(event, Delta) and event.scores:
                    values = [score.logprob for score in event.scores[0].named]
                elif isinstance(event, Ended):
                    num_cached = event.num_cached
        return values, num_cached

    async def one(number: int, each: Asked) -> Expected:
        values: list[float] = []
        num_cached = 0
        for start in range(0, len(each.token_ids), MAX_NAMED):
            tokens = each.token_ids[start : start + MAX_NAMED]
            logprob, num_cached = await named(number, each, tokens)
            values += logprob
        num_prompt = len(each.prompt_ids)
        return Expected(values=np.array(values), num_prompt=num_prompt, num_cached=num_cached)

    works = ((len(each.prompt_ids), partial(one, i, each)) for i, each in enumerate(asked))
    return await run_admitted(works, services.engine)


def _one_token(tokens: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=tokens
    )
