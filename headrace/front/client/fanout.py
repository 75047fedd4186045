"""n and best_of: several answers to one prompt.

Each answer is an engine request of its own; they share the prompt's KV through the prefix cache. Answer 0 has the
caller's seed, the others seeds derived from it, so that a seed reproduces all of them.
"""

from __future__ import annotations

import msgspec

from headrace.base import splitmix
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Delta, Ended, Events, ScoredToken


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of answer `index`: SplitMix64 of seed and index; 63 bits."""
    if seed is None or index == 0:
        return seed
    return splitmix.mix(seed + index * splitmix.GAMMA) >> 1


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`; only answer 0 scores the prompt and tells its attention."""
    if index == 0:
        return params
    return msgspec.structs.replace(
        params,
        seed=choice_seed(params.seed, index),
        prompt_logprobs=None,
        capture_layers=(),
    )


class _Answer(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    scores: list[ScoredToken] = []
    ended: Ended | None = None

    def mean_logprob(self) -> float:
        assert self.ended is not None and self.ended.cumulative_logprob is not None
        return self.ended.cumulative_logprob / max(len(self.token_ids), 1)


async def best_of(events: Events, *, n: int, candidates: int, keep_scores: bool) -> Events:
    """The `n` answers with the highest mean log-probability out of `candidates`, in that order, once all have ended."""
    answers = [_Answer() for _ in range(candidates)]
    async for event in events:
        if isinstance(event, Delta):
            answer = answers[event.index]
            answer.text += event.text
            answer.token_ids += event.token_ids
            answer.scores += event.scores or []
        elif isinstance(event, Ended):
            answers[event.index].ended = event
        else:
            yield event
    answers.sort(key=_Answer.mean_logprob, reverse=True)
    for index, answer in enumerate(answers[:n]):
        assert answer.ended is not None
        yield Delta(
            index=index,
            text=answer.text,
            token_ids=answer.token_ids,
            scores=answer.scores if keep_scores else None,
        )
        cumulative = answer.ended.cumulative_logprob if keep_scores else None
        yield msgspec.structs.replace(answer.ended, index=index, cumulative_logprob=cumulative)
