"""Several pieces of work at once: all of them, or the first failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from headrace.base.errors import Unavailable

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
    crowd = _Crowd(window)
    return await all_of(crowd.admitted(work) for work in works)


class _Crowd:
    """The parts of one request. `_inside` of them are with the engine; `_done`: one has come back."""

    def __init__(self, window: int) -> None:
        self._places = asyncio.Semaphore(window)
        self._inside = 0
        self._done = False

    async def admitted(self, work: Callable[[], Work[T]]) -> T:
        """The result of one part."""
        async with self._places:
            while True:
                self._inside += 1
                try:
                    found = await work()
                except Unavailable:
                    self._inside -= 1
                    if not self._inside and not self._done:
                        raise
                else:
                    self._inside -= 1
                    self._done = True
                    return found
                await asyncio.sleep(RETRY_S)
