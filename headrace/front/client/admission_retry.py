"""Several pieces of work at once: all of them, or the first failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import DeadlineExceeded, Unavailable
from headrace.front.client.events import EngineClient, Events, Generation

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


async def run_admitted(works: Iterable[Callable[[], Work[T]]], *, window: int) -> list[T]:
    """`all_of` for the parts of one request, at most `window` of them at once.

    They are admitted as a whole: a part that finds the engine's queue full is tried again, so that
    what was done for the others is not lost. Unavailable only where no part found room."""
    retrying_engine, places = _Admission(), asyncio.Semaphore(window)

    async def admitted(work: Callable[[], Work[T]]) -> T:
        async with places:
            while True:
                retrying_engine.inside += 1
                try:
                    result = await work()
                except Unavailable:
                    if retrying_engine.is_refused():
                        raise
                else:
                    retrying_engine.inside -= 1
                    retrying_engine.found_room = True
                    return result
                await asyncio.sleep(RETRY_S)

    return await all_of(admitted(work) for work in works)


class RetryingEngine:
    """The engine, for the generations of one request: as in `run_admitted` they are admitted as a
    whole. How long one waits for room is part of its deadline."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._crowd = _Admission()

    def generate(self, generation: Generation) -> Events:
        """See `events.EngineClient.generate`. The deadline counts from now, not from when the
        events are read."""
        return self._generate_admitted(generation, time.monotonic())

    async def _generate_admitted(self, generation: Generation, made_at: float) -> Events:
        retrying_engine, admitted = self._crowd, False
        while not admitted:
            retrying_engine.inside += 1
            try:
                async with aclosing(self._engine.generate(left_of(generation, made_at))) as events:
                    async for event in events:
                        admitted = retrying_engine.found_room = True
                        yield event
            except Unavailable:
                if admitted or retrying_engine.is_refused():
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


class _Admission:
    """The parts of one request. `inside` of them are with the engine; `found_room`: one has been
    admitted."""

    def __init__(self) -> None:
        self.inside = 0
        self.found_room = False

    def is_refused(self) -> bool:
        """A part was refused: whether all are, because no other found room or still may."""
        self.inside -= 1
        return not self.inside and not self.found_room
