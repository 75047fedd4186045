"""A queue in which tenants share the tokens.

Deficit round robin, weighted, with the rounds computed at once: every tenant's debt grows by tokens
/ weight for what is spent on it, prompts when they start and each token it decodes. The tenant
deepest below the others is tried first, as deficit round robin does with a quantum of one token. A
tenant that comes back from idleness starts at the level of the others: credit is not hoarded, debt
is not forgiven while anything of it runs. Within a tenant: by key, that is as they are due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from headrace.core.request import Request
from headrace.core.scheduler.queue import OrderedQueue


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
