"""The waiting requests in the order in which they are tried.

A request that is tried and cannot run stays where it is, so that any subset may be skipped in any
step and the order of the rest is kept. A request that comes back after a preemption takes the place
its key gives it. The policy says the key (a smaller one goes first), and whether tenants have
queues of their own that share the tokens.

That is deficit round robin, weighted, with the rounds computed at once: every tenant's debt grows
by tokens / weight for what is spent on it, prompts when they start and each token it decodes. The
tenant deepest below the others is tried first, as deficit round robin does with a quantum of one
token. A tenant that comes back from idleness starts at the level of the others: credit is not
hoarded, debt is not forgiven while anything of it runs. Within a tenant: by key, that is as
they are due.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.wire.load import order_s
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

    def ahead(self, request: Request) -> int:
        """About how many requests of the queue start before this one, which is not in it."""
        ...

    def quantiles(self, count: int) -> list[Request]:
        """About so many requests at equal distances of the order in which they start; none where
        there is no such order."""
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

    def ahead(self, request: Request) -> int:
        """See Queue."""
        return self.position(request)

    def quantiles(self, count: int) -> list[Request]:
        """See Queue."""
        return self._items[:: max(1, len(self._items) // count)]

    def started(self, request: Request) -> None:
        """See Queue."""

    def ended(self, request: Request) -> None:
        """See Queue."""

    def charge(self, rows: npt.NDArray[np.intp]) -> None:
        """See Queue."""


class _Tenant:
    __slots__ = ("num_running", "slot", "waiting")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.waiting = OrderedQueue()
        self.num_running = 0


class FairQueue:
    """Waiting requests by tenant; see Queue. `debt` [slot] is in tokens per unit of weight. Where
    adapters share, `sharer_of` gives a request's instead of its tenant.
    A tenant's weight is that of the server's configuration, else that of its newest request."""

    def __init__(
        self,
        num_rows: int,
        weights: Mapping[str, float],
        sharer_of: Callable[[Request], str] = attrgetter("wire.tenant"),
    ) -> None:
        self._weights = weights
        self._sharer_of = sharer_of
        self.num_tokens = 0
        self._count = 0
        self._tenants: dict[str, _Tenant] = {}
        self._free_slots: list[int] = []
        self._debt = np.zeros(8)
        self._per_token = np.zeros(8)
        self._slot_of_row = np.zeros(num_rows, np.intp)
        self._level = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.waiting

    def debt(self, tenant: str) -> float:
        """What has been spent on an active tenant, in tokens per unit of weight."""
        return float(self._debt[self._tenants[tenant].slot])

    def push(self, request: Request) -> None:
        """See Queue."""
        name = self._sharer_of(request)
        tenant = self._tenants.get(name) or self._admit(name)
        if not tenant.waiting:
            self._raise_level()
            self._debt[tenant.slot] = max(self._debt[tenant.slot], self._level)
        self._per_token[tenant.slot] = 1.0 / self._weights.get(name, request.wire.weight)
        tenant.waiting.push(request)
        self._count += 1
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """See Queue."""
        name = self._sharer_of(request)
        self._tenants[name].waiting.remove(request)
        self._count -= 1
        self.num_tokens -= request.num_tokens
        self._forget_if_idle(name)

    def scan(self) -> Iterator[Request]:
        """See Queue."""
        heap = [
            (float(self._debt[tenant.slot]), tenant.slot, 0, tenant)
            for tenant in self._tenants.values()
            if tenant.waiting
        ]
        heapq.heapify(heap)
        while heap:
            _, slot, index, tenant = heapq.heappop(heap)
            items = tenant.waiting
            request = items.at(index)
            yield request
            if index < len(items) and items.at(index) is request:
                index += 1
            if index < len(items):
                heapq.heappush(heap, (float(self._debt[slot]), slot, index, tenant))

    def position(self, request: Request) -> int:
        """See Queue."""
        return self._tenants[self._sharer_of(request)].waiting.position(request)

    def ahead(self, request: Request) -> int:
        """See Queue: between two requests of a tenant each other one has its turn."""
        num_others = sum(
            len(tenant.waiting) > 0
            for name, tenant in self._tenants.items()
            if name != self._sharer_of(request)
        )
        tenant = self._tenants.get(self._sharer_of(request))
        own = tenant.waiting.position(request) if tenant else 0
        return min(self._count, own + (own + 1) * num_others)

    def quantiles(self, count: int) -> list[Request]:
        """See Queue."""
        return []

    def started(self, request: Request) -> None:
        """See Queue. A prompt is paid for once, not again when it is recomputed."""
        tenant = self._tenants[self._sharer_of(request)]
        tenant.num_running += 1
        self._slot_of_row[request.row] = tenant.slot
        self._level = max(self._level, float(self._debt[tenant.slot]))
        if request.num_preemptions == 0:
            computed = request.num_tokens - request.num_cached
            self._debt[tenant.slot] += computed * self._per_token[tenant.slot]

    def ended(self, request: Request) -> None:
        """See Queue."""
        name = self._sharer_of(request)
        self._tenants[name].num_running -= 1
        self._forget_if_idle(name)

    def charge(self, rows: npt.NDArray[np.intp]) -> None:
        """See Queue."""
        counts = np.bincount(self._slot_of_row[rows], minlength=len(self._debt))
        self._debt += counts * self._per_token

    def _admit(self, name: str) -> _Tenant:
        if not self._free_slots:
            first = len(self._tenants)
            if first == len(self._debt):
                self._debt = np.concatenate([self._debt, np.zeros(first)])
                self._per_token = np.concatenate([self._per_token, np.zeros(first)])
            self._free_slots = list(range(len(self._debt) - 1, first - 1, -1))
        tenant = self._tenants[name] = _Tenant(self._free_slots.pop())
        self._debt[tenant.slot] = 0.0
        self._per_token[tenant.slot] = 1.0
        return tenant

    def _raise_level(self) -> None:
        active = [
            float(self._debt[tenant.slot])
            for tenant in self._tenants.values()
            if tenant.waiting or tenant.num_running
        ]
        if active:
            self._level = max(self._level, min(active))

    def _forget_if_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.waiting and not tenant.num_running:
            del self._tenants[name]
            self._free_slots.append(tenant.slot)


Key = Callable[[Request], tuple[int, ...]]


def by_due_time(request: Request) -> tuple[int, ...]:
    """Due first, first served; those without a deadline by arrival."""
    due_s = request.arrived_at + order_s(request.wire.deadline_s)
    return (round(1e6 * due_s), request.arrival)


def by_priority(request: Request) -> tuple[int, ...]:
    """Lower priority values first, then as they are due."""
    return (request.wire.priority, *by_due_time(request))


def by_output(request: Request) -> tuple[int, ...]:
    """The longest answer first, by what it may have at most."""
    return (-request.wire.stop.max_tokens, *by_due_time(request))


_KEYS: dict[str, Key] = {"priority": by_priority, "lof": by_output}


def key_of(policy: str) -> Key:
    """The order of running requests, and of the queue where it has no other (orders.py)."""
    return _KEYS.get(policy, by_due_time)
