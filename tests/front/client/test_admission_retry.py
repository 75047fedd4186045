"""The generations of one request are admitted as a whole: who finds no room waits, unless nobody found any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from headrace.base.errors import DeadlineExceeded, InvalidRequest, Unavailable
from headrace.base.wire.request import SamplingParams
from headrace.front.client.admission_retry import RetryingEngine, run_admitted
from headrace.front.client.events import Ended, Event, Generation, Started


class Door:
    """An engine that lets in whom `open` says, by how often it was asked."""

    def __init__(self, *open_at: int) -> None:
        self.open_at = open_at
        self.asked = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        self.asked += 1
        if self.asked not in self.open_at:
            raise Unavailable("full", retry_after_s=1.0)
        yield Started(1)
        yield Ended(index=0, reason="stop")


def run(door: Any, *, count: int = 2, deadline_s: float = 60.0) -> int:
    """Events of `count` generations, one behind the other."""

    async def go() -> int:
        engine = RetryingEngine(door)
        params = SamplingParams()
        one = Generation(prompt_ids=[1], params=params, deadline_s=deadline_s)
        return len([event for _ in range(count) async for event in engine.generate(one)])

    return asyncio.run(go())


def test_a_later_part_waits_for_room() -> None:
    door = Door(1, 4)
    assert run(door) == 4 and door.asked == 4


def test_where_none_found_room_the_request_is_refused_at_once() -> None:
    door = Door(2)
    with pytest.raises(Unavailable):
        run(door)
    assert door.asked == 1


def test_the_wait_ends_with_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="not started within"):
        run(Door(1), deadline_s=0.2)


class Steps:
    """An engine whose parts end when the test says so; `running` in the order in which they began."""

    window, window_tokens = 4, 100

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Future[int]] = {}
        self.most_tokens = 0

    def part(self, number: int, tokens: int) -> tuple[int, Callable[[], Coroutine[Any, Any, int]]]:
        async def work() -> int:
            self.running[number] = ended = asyncio.get_running_loop().create_future()
            return await ended

        return tokens, work

    async def settled(self) -> list[int]:
        for _ in range(10):
            await asyncio.sleep(0)
        return list(self.running)

    def end(self, number: int) -> None:
        self.running.pop(number).set_result(number)


async def test_a_wide_request_has_two_steps_of_tokens_with_the_engine_and_no_more() -> None:
    steps: Any = Steps()
    sizes = [40, 40, 40, 300, 10, 10, 10, 10, 10]
    works = (steps.part(*numbered) for numbered in enumerate(sizes))
    results = asyncio.ensure_future(run_admitted(works, steps))
    assert await steps.settled() == [0, 1], "120 tokens are more than two steps take"
    steps.end(0)
    assert await steps.settled() == [1, 2]
    steps.end(1)
    assert await steps.settled() == [2]
    steps.end(2)
    assert await steps.settled() == [3], "larger than both steps: alone"
    steps.end(3)
    assert await steps.settled() == [4, 5, 6, 7], "no more parts than run in two steps either"
    for number in (4, 5, 6, 7, 8):
        steps.end(number)
        await steps.settled()
    assert await results == list(range(9))


async def test_a_part_that_fails_ends_the_others_and_those_that_wait() -> None:
    steps: Any = Steps()
    results = asyncio.ensure_future(run_admitted((steps.part(i, 60) for i in range(5)), steps))
    assert await steps.settled() == [0]
    steps.running[0].set_exception(InvalidRequest("not this one"))
    with pytest.raises(InvalidRequest, match="not this one"):
        await results
    assert await steps.settled() == [0]
