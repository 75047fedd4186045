"""Several pieces of work at once: all of them, or the first failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import DeadlineExceeded, Unavailable
from headrace.front.client.events import Engine, Events, Generation

T = TypeVar("T")
Work = Coroutine[Any, Any, T]
RETRY_S = 0.05


async def all_of(works: Iterable[Work[T]]) -> list[T]:
    """The results in order. The first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def all_admitted(works: Iterable[Callable[[], Work[T]]], *, window: int) -> list[T]:
    """`all_of` for the parts of one request, at most `window` of them at once.

    They are admitted as a whole: a part that finds the engine's queue full is tried again, so that what was done for
    the others is not lost. Unavailable only where no part found room.
    """
    crowd, places = _Crowd(), asyncio.Semaphore(window)

    async def admitted(work: Callable[[], Work[T]]) -> T:
        async with places:
            while True:
                crowd.inside += 1
                try:
                    found = await work()
                except Unavailable:
                    if crowd.is_refused():
                        raise
                else:
                    crowd.inside -= 1
                    crowd.found_room = True
                    return found
                await asyncio.sleep(RETRY_S)

    return await all_of(admitted(work) for work in works)


class PatientEngine:
    """The engine, for the generations of one request: as in `all_admitted` they are admitted as a whole. How long one
    waits for room is part of its deadline."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._crowd = _Crowd()

    def generate(self, generation: Generation) -> Events:
        """See `events.Engine.generate`. The deadline counts from now, not from when the events are read."""
        return self._patient(generation, time.monotonic())

    async def _patient(self, generation: Generation, made_at: float) -> Events:
        crowd, admitted = self._crowd, False
        while not admitted:
            crowd.inside += 1
            try:
                async with aclosing(self._engine.generate(left_of(generation, made_at))) as events:
                    async for event in events:
                        admitted = crowd.found_room = True
                        yield event
            except Unavailable:
                if admitted or crowd.is_refused():
                    raise
                await asyncio.sleep(RETRY_S)


def left_of(generation: Generation, made_at: float) -> Generation:
    """The generation with what is left of its time, which counts from `made_at`."""
    limit = generation.deadline_s
    if limit is None:
        return generation
    left = made_at + limit - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"not started within {limit:.3g} s", field="timeout_s")
    return msgspec.structs.replace(generation, deadline_s=left)


class _Crowd:
    """The parts of one request. `inside` of them are with the engine; `found_room`: one has been admitted."""

    def __init__(self) -> None:
        self.inside = 0
        self.found_room = False

    def is_refused(self) -> bool:
        """A part was refused: whether all are, because no other found room or still may."""
        self.inside -= 1
        return not self.inside and not self.found_room
