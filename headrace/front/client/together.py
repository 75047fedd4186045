"""Several pieces of work at once: all of them, or the first failure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
