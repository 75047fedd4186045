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


async def run_admitted(
    works: Iterable[tuple[int, Callable[[], Work[T]]]], engine: EngineClient
) -> list[T]:
    """`all_of` for the parts of one request, each with its number of prompt tokens; at once as many
    as the engine does in two steps, of as many tokens: it stays busy, and who comes meanwhile waits
    for two steps and not for the whole request.

    They are admitted as a whole: a part that finds the engine's queue full is tried again, so that
    what was done for the others is not lost. Unavailable only where no part found room."""
    crowd, room = _Admission(), _Room(engine.window, engine.window_tokens)

    async def admitted(work: Callable[[], Work[T]], tokens: int) -> T:
        try:
            return await crowd.admitted(work)
        finally:
            room.give_back(tokens)

    try:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[T]] = []
            for tokens, work in works:
                await room.take(tokens)
                tasks.append(group.create_task(admitted(work, tokens)))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class _Room:
    """What the parts of one request may have with the engine at once: so many of them, of so many
    tokens together. One part always may. Taken by one task."""

    def __init__(self, parts: int, tokens: int) -> None:
        self._parts, self._tokens = parts, tokens
        self._num_parts = self._num_tokens = 0
        self._freed = asyncio.Event()

    async def take(self, tokens: int) -> None:
        """Waits until there is room for one more part."""
        while self._num_parts and (
            self._num_parts == self._parts or self._num_tokens + tokens > self._tokens
        ):
            self._freed.clear()
            await self._freed.wait()
        self._num_parts += 1
        self._num_tokens += tokens

    def give_back(self, tokens: int) -> None:
        """A part is over."""
        self._num_parts -= 1
        self._num_tokens -= tokens
        self._freed.set()


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

    async def admitted(self, work: Callable[[], Work[T]]) -> T:
        """The result of a part, which is tried again while another one finds room."""
        while True:
            self.inside += 1
            try:
                result = await work()
            except Unavailable:
                if self.is_refused():
                    raise
            else:
                self.inside -= 1
                self.found_room = True
                return result
            await asyncio.sleep(RETRY_S)

    def is_refused(self) -> bool:
        """A part was refused: whether all are, because no other found room or still may."""
        self.inside -= 1
        return not self.inside and not self.found_room
