"""What a lossy model's predictions lose beside another's: both read the same right answers, token
by token, each after the true text before it.

Of each token the probability of the right one and the TOP likeliest are known. The divergence is
Kullback and Leibler's of the other's distribution from this one's, with all ids that are not among
the likeliest of both taken together: at most the true one, and close to it where the likeliest
hold nearly everything.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.wire.request import SamplingParams
from headrace.bench.held_out import EvalItem
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import Generation, PromptScored, ScoredToken
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import has_media

TOP = 20
READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)


@dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """The tokens of a right answer, and what a model thought of each."""

    ids: tuple[int, ...]
    scores: tuple[ScoredToken, ...]


class TaskLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Of one task's answers: perplexities of both models, the mean divergence in nats a token, and
    how often both find the same token likeliest."""

    task: str
    tokens: int
    perplexity: float
    against: float
    divergence: float
    agreement: float


async def read_answers(
    engine: AsyncLLM, template: ChatTemplate, items: Sequence[EvalItem], *, streams: int
) -> list[AnswerScores]:
    """The right answers of items that have one in words, `streams` at a time."""
    gate = asyncio.Semaphore(streams)

    async def one(item: EvalItem) -> AnswerScores:
        answer = engine.tokenizer.encode_written(item.reference)
        scores: list[ScoredToken | None] = []
        async with gate:
            prompt = await template.render_async(
                [dict(m) for m in item.messages],
                tools=None if item.tools is None else [dict(t) for t in item.tools],
                kwargs=item.template_kwargs,
            )
            generation = Generation(prompt_ids=[*prompt, *answer], params=READ)
            async for event in engine.generate(generation):
                if isinstance(event, PromptScored):
                    scores = event.scores
        own = [score for score in scores[len(prompt) :] if score is not None]
        return AnswerScores(ids=tuple(answer), scores=tuple(own))

    worded = [
        item
        for item in items
        if item.reference and not item.audio and not has_media([dict(m) for m in item.messages])
    ]
    return list(await asyncio.gather(*(one(item) for item in worded)))


def compare(task: str, ours: list[AnswerScores], theirs: list[AnswerScores]) -> TaskLoss | None:
    """The losses of one task; None without answers to read. ConfigError for models whose tokens
    differ."""
    pairs = []
    for mine, other in zip(ours, theirs, strict=True):
        if mine.ids != other.ids:
            raise ConfigError(
                "--against: the two models cut text into different tokens", field="--against"
            )
        pairs += zip(mine.scores, other.scores, strict=True)
    if not pairs:
        return None
    count = len(pairs)
    return TaskLoss(
        task=task,
        tokens=count,
        perplexity=math.exp(-sum(mine.token.logprob for mine, _ in pairs) / count),
        against=math.exp(-sum(other.token.logprob for _, other in pairs) / count),
        divergence=sum(divergence(other, mine) for mine, other in pairs) / count,
        agreement=sum(mine.top[0].id == other.top[0].id for mine, other in pairs) / count,
    )


def divergence(of: ScoredToken, by: ScoredToken) -> float:
    """Nats that are lost where `by` stands for `of`, over the ids that both name, and the rest."""
    known = {score.id: score.logprob for score in (by.token, *by.top)}
    named = {score.id: score.logprob for score in (of.token, *of.top) if score.id in known}
    rest = max(1.0 - sum(math.exp(logprob) for logprob in named.values()), 0.0)
    missing = max(1.0 - sum(math.exp(known[id]) for id in named), 1e-12)
    total = sum(math.exp(logprob) * (logprob - known[id]) for id, logprob in named.items())
    if rest > 0.0:
        total += rest * math.log(rest / missing)
    return max(total, 0.0)
