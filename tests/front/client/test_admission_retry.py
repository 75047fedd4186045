"""The generations of one request are admitted as a whole: who finds no room waits, unless nobody found any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.base.errors import DeadlineExceeded, Unavailable
from headrace.base.wire.request import SamplingParams
from headrace.front.client.admission_retry import RetryingEngine
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


def run(door: Any, *, count: int = 2, deadline_s: float = 5.0) -> int:
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
