"""The best of several answers to a prompt (`best_of`)."""

from __future__ import annotations

import msgspec

from headrace.front.client.events import Delta, Ended, Events, ScoredToken


class _RankedAnswer(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    scores: list[ScoredToken] = []
    ended: Ended | None = None

    def mean_logprob(self) -> float:
        assert self.ended is not None and self.ended.cumulative_logprob is not None
        return self.ended.cumulative_logprob / max(len(self.token_ids), 1)


async def best_of(events: Events, *, n: int, candidates: int, keep_scores: bool) -> Events:
    """The `n` answers with the highest mean log-probability out of `candidates`, in that order,
    once all have ended."""
    answers = [_RankedAnswer() for _ in range(candidates)]
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
    answers.sort(key=_RankedAnswer.mean_logprob, reverse=True)
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
