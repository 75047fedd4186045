"""Who goes first: the order of requests under each policy, as a key (smaller goes first; arrivals are unique)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.request import Request
from headrace.core.scheduler.fair import FairQueue
from headrace.core.scheduler.queue import OrderedQueue, Queue

Key = Callable[[Request], tuple[int, ...]]


def by_arrival(request: Request) -> tuple[int, ...]:
    """First come, first served."""
    return (request.arrival,)


def by_priority(request: Request) -> tuple[int, ...]:
    """Lower priority values first, then by arrival."""
    return (request.wire.priority, request.arrival)


_KEYS: dict[str, Key] = {"fcfs": by_arrival, "priority": by_priority, "fair": by_arrival}


def key_of(policy: str) -> Key:
    """The order of running requests, and of the queue where it is not shared between tenants."""
    return _KEYS[policy]


def queue_of(policy: str, *, num_rows: int) -> Queue:
    """An empty queue for the policy."""
    return FairQueue(num_rows) if policy == "fair" else OrderedQueue()
