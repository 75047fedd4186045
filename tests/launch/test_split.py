"""A step's output goes to the frontends that own its requests, whatever it consists of."""

from __future__ import annotations

import numpy as np

from headrace.base.wire.pooling import Pooled
from headrace.base.wire.request import Finished, PromptLogprobs, TokenBatch
from headrace.launch.core_process import split

NONE = np.zeros(0, np.int64)
OWNER = {1: 10, 2: 20, 3: 10}


def scores() -> PromptLogprobs:
    return PromptLogprobs(1, np.zeros((1, 1)), np.zeros((1, 1)), np.ones(1))


def batch(**parts: object) -> TokenBatch:
    empty = {"ids": NONE, "tokens": np.zeros(0, np.int32)}
    return TokenBatch(**{**empty, **parts})


def test_one_front_gets_the_batch_itself() -> None:
    whole = batch(pooled=[(1, Pooled(0, np.zeros((1, 2))))])
    assert split(whole, OWNER) == {10: whole}


def test_each_front_gets_its_own_part_of_everything() -> None:
    whole = batch(
        ids=np.array([1, 2, 3]),
        tokens=np.array([7, 8, 9], np.int32),
        prompt_logprobs=[(2, scores())],
        pooled=[(1, Pooled(0, np.zeros((1, 2)))), (2, Pooled(0, np.ones((1, 2))))],
        finished=[Finished(id=3, reason="stop")],
        queued=[2, 1, 9],
    )
    found = split(whole, OWNER)
    assert found.keys() == {10, 20}
    assert found[10].tokens.tolist() == [7, 9] and found[20].tokens.tolist() == [8]
    assert [i for i, _ in found[10].pooled] == [1] and [i for i, _ in found[20].pooled] == [2]
    assert (found[10].queued, found[20].queued) == ([1], [2])
    assert not found[10].prompt_logprobs and [i for i, _ in found[20].prompt_logprobs] == [2]
    assert [end.id for end in found[10].finished] == [3] and not found[20].finished


def test_what_nobody_owns_any_more_goes_nowhere() -> None:
    whole = batch(ids=np.array([1, 9]), tokens=np.array([7, 8], np.int32))
    assert split(whole, OWNER).keys() == {10}
    assert split(batch(queued=[9, 3]), OWNER)[10].queued == [3]
    assert split(batch(pooled=[(9, Pooled(0, np.zeros((1, 2))))]), OWNER) == {}
