"""The waiting requests in the order in which they are tried.

A request that is tried and cannot run stays where it is, so that any subset may be skipped in any step and the order of
the rest is kept (ENG-03). A request that comes back after a preemption takes the place its key gives it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.core.request import Request

_key = attrgetter("key")


class Queue(Protocol):
    """What the scheduler asks of a queue."""

    num_tokens: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def push(self, request: Request) -> None:
        """Adds a request at the place of its key."""
        ...

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the queue."""
        ...

    def scan(self) -> Iterator[Request]:
        """The requests in the order to try them; the one just yielded may be removed meanwhile."""
        ...

    def position(self, request: Request) -> int:
        """How many requests are tried before this one (of its own tenant, where tenants share)."""
        ...

    def started(self, request: Request) -> None:
        """The request has got a row and the KV of its cached tokens."""
        ...

    def ended(self, request: Request) -> None:
        """A request that has a row is about to lose it."""
        ...

    def charge(self, rows: npt.NDArray[np.intp]) -> None:
        """One token was spent on each of these rows."""
        ...


class OrderedQueue:
    """A sorted list: by (arrival) or by (priority, arrival)."""

    def __init__(self) -> None:
        self._items: list[Request] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def at(self, index: int) -> Request:
        """The request at this position."""
        return self._items[index]

    def push(self, request: Request) -> None:
        """See Queue."""
        insort(self._items, request, key=_key)
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """See Queue."""
        index = self.position(request)
        assert self._items[index] is request, request.id
        del self._items[index]
        self.num_tokens -= request.num_tokens

    def scan(self) -> Iterator[Request]:
        """See Queue."""
        index, items = 0, self._items
        while index < len(items):
            request = items[index]
            yield request
            if index < len(items) and items[index] is request:
                index += 1

    def position(self, request: Request) -> int:
        """See Queue."""
        return bisect_left(self._items, request.key, key=_key)

    def started(self, request: Request) -> None:
        """See Queue."""

    def ended(self, request: Request) -> None:
        """See Queue."""

    def charge(self, rows: npt.NDArray[np.intp]) -> None:
        """See Queue."""
