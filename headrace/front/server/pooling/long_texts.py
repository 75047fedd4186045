"""Texts that are longer than the model's context, and texts that are parts of one.

A long text is cut into chunks as long as the context, each between the special tokens that the
whole stood between; its vector is the mean of theirs, weighted by their tokens. Late chunking
(Guenther et al. 2024) is the other way round: all texts of a request are computed as one, and each
gets the mean of its own tokens, which have seen the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from headrace.base.errors import InvalidRequest
from headrace.front.client.pooling import PooledAnswer
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.pooling import (
    PoolInput,
    PoolJob,
    pooled,
    shortened,
    tokenized,
)


def longest_of(context: RequestContext) -> int:
    """The most tokens of a text that is embedded."""
    services = context.services
    return max(services.text.max_model_len, services.server.max_embed_tokens or 0)


async def pooled_in_chunks(
    context: RequestContext, inputs: Sequence[PoolInput], job: PoolJob
) -> list[PooledAnswer]:
    """As `pooled`, one row for each input, however long it is."""
    chunks = [
        [one] if one.media else [PoolInput(ids=ids) for ids in _chunks(context, one.ids)]
        for one in inputs
    ]
    flat = list(chain.from_iterable(chunks))
    answers = await pooled(context, flat, job)
    bounds = pairwise([0, *accumulate(map(len, chunks))])
    return [_joined(answers[begin:end]) for begin, end in bounds]


def _chunks(context: RequestContext, ids: list[int]) -> list[list[int]]:
    services = context.services
    most = services.text.max_model_len
    if len(ids) <= most:
        return [ids]
    before, after = services.tokenizer.special_around()
    begins, ends = ids[: len(before)] == before, ids[len(ids) - len(after) :] == after
    if not (begins and ends):  # ids as they were sent, or a conversation
        before, after = [], []
    inside = ids[len(before) : len(ids) - len(after)]
    step = most - len(before) - len(after)
    return [[*before, *inside[i : i + step], *after] for i in range(0, len(inside), step)]


def _joined(answers: list[PooledAnswer]) -> PooledAnswer:
    if len(answers) == 1:
        return answers[0]
    lengths = np.array([answer.num_prompt for answer in answers], np.float32)
    vectors = np.concatenate([answer.values for answer in answers])
    mean = np.average(vectors, axis=0, weights=lengths)
    return PooledAnswer(
        values=mean.astype(np.float32)[None],
        num_prompt=sum(answer.num_prompt for answer in answers),
        num_cached=sum(answer.num_cached for answer in answers),
    )


async def pooled_as_one(
    context: RequestContext, texts: object, job: PoolJob, *, special: bool
) -> list[PooledAnswer]:
    """A row for each of these texts, which are parts of one: the mean of its own tokens. The usage
    of the special tokens around all is in the first."""
    spec = context.services.text.pooling
    if spec.how != "mean" or spec.projected:
        raise InvalidRequest(
            f"late_chunking: this model pools by {spec.how!r}"
            f"{' and a dense layer' if spec.projected else ''}; only of a plain mean of the tokens "
            "have parts of a text vectors of their own",
            field="late_chunking",
        )
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            "late_chunking: input must be a list of texts, the parts of one", field="late_chunking"
        )
    parts = [await tokenized(context, text, field="input", special=False) for text in texts]
    before, after = context.services.tokenizer.special_around() if special else ([], [])
    ids = [*before, *chain.from_iterable(parts), *after]
    shortened(ids, None, most=context.services.text.max_model_len, field="input")
    (whole,) = await pooled(context, [PoolInput(ids=ids)], job)
    bounds = list(pairwise(accumulate(map(len, parts), initial=len(before))))
    answers = [
        PooledAnswer(
            values=whole.values[begin:end].mean(axis=0, keepdims=True),
            num_prompt=end - begin,
            num_cached=0,
        )
        for begin, end in bounds
    ]
    first = PooledAnswer(
        values=answers[0].values,
        num_prompt=answers[0].num_prompt + len(before) + len(after),
        num_cached=whole.num_cached,
    )
    return [first, *answers[1:]]
