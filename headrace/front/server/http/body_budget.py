"""The memory that request bodies may take in one process, all of them together.

A body is bounded by itself (limits.py), bodies together here: in all, and each key by half of it,
so that no key takes the room of the others. The first FREE_BYTES of a body count for nothing:
connections are bounded in number, and an ordinary request never meets the budget. A larger one
takes room before its bytes are read. Where none is left it waits for a moment, with its bytes still
in the client's and the kernel's buffers, and is then refused: 429 by its key's bound, 503 by that
of the server. A body that arrives slowly keeps its room from others, so it has a least rate."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable

from headrace.base import heap
from headrace.base.errors import OverloadError, RateLimited, RequestError, Unavailable

FREE_BYTES = 64 * 1024
WAIT_S = 1.0
MAX_WAITING = 64
MIN_BYTES_PER_S = 128 * 1024
"""The least rate at which a body arrives that has taken room."""
RETRY_S = 2.0
TRIM_PERIOD_S = 1.0
QUIET_S = 5.0
"""So long after the last body its memory is given back: work on it may end later than its room."""


class BodyTimeout(RequestError):
    """The body stopped arriving, or came too slowly."""

    status = 408


class BodyBudget:
    """`total` bytes for the bodies of this process beyond their first FREE_BYTES, half of it for
    one tenant.

    What bodies were made into lies in pieces in the C library's heap, which keeps it (1 GiB after
    240 bodies of up to 8 MiB): while they come and go `trim` gives it back, in a thread, once a
    second. Failures refer to the frames that hold a body's document, and these to the failures:
    once no bodies come any more, one collection ends them (behind 300 bodies 101 MiB were kept
    without it, 43 with it). Among bodies it would go through millions of objects.

    `rest` is called then too.

    Invariants: what is held never exceeds a bound; no tenant is kept at zero; at most MAX_WAITING
    bodies wait."""

    def __init__(
        self,
        total: int,
        trim: Callable[[], None] = heap.trim,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._total, self._share = total, total // 2
        self._trim, self._rest = trim, rest
        self._trimming: asyncio.Task[None] | None = None
        self._given_back_at = 0.0
        self._held = Counter[str]()
        self._num_waiting = 0
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """What all bodies hold now."""
        return self._held.total()

    async def take(self, tenant: str, amount: int, *, wait_s: float) -> None:
        """Takes so many bytes of room, at once or within `wait_s`; RateLimited, Unavailable."""
        refusal = self._refusal(tenant, amount)
        if refusal is not None and wait_s > 0 and self._num_waiting < MAX_WAITING:
            refusal = await self._waited(tenant, amount, wait_s)
        if refusal is not None:
            raise refusal
        self._held[tenant] += amount

    async def _waited(self, tenant: str, amount: int, wait_s: float) -> OverloadError | None:
        """Waits until there is room, or no longer; what still stands against it then."""
        end = time.monotonic() + wait_s
        self._num_waiting += 1
        try:
            while refusal := self._refusal(tenant, amount):
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        await self._freed.wait()
                except TimeoutError:
                    return refusal
            return None
        finally:
            self._num_waiting -= 1

    def _refusal(self, tenant: str, amount: int) -> OverloadError | None:
        mine, all_bytes = self._held[tenant], self._held.total()
        if not mine:
            del self._held[tenant]
        if mine + amount > self._share:
            return RateLimited(
                f"this key's request bodies hold {mine} bytes here, with {amount} more than the "
                f"{self._share} they may; wait for a request to end",
                retry_after_s=RETRY_S,
            )
        if all_bytes + amount > self._total:
            return Unavailable(
                f"request bodies hold {all_bytes} bytes here, with {amount} more than the "
                f"{self._total} they may",
                retry_after_s=RETRY_S,
            )
        return None

    def give_back(self, tenant: str, amount: int) -> None:
        """Room is free again; those that wait look for it."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        self._freed.set()
        self._freed = asyncio.Event()
        self._given_back_at = time.monotonic()
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.get_running_loop().create_task(self._trim_until_quiet())

    async def _trim_until_quiet(self) -> None:
        last = -1.0
        while self._given_back_at != last:
            while time.monotonic() < self._given_back_at + QUIET_S:
                await asyncio.sleep(TRIM_PERIOD_S)
                await asyncio.to_thread(self._trim)
            last = self._given_back_at
            gc.collect()
            self._rest()
            await asyncio.to_thread(self._trim)


class BodyRoom:
    """What one body holds of the budget. Closing it twice is closing it once."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget, self._tenant = budget, tenant
        self._bytes = 0

    async def grow_to(self, num_bytes: int, *, wait_s: float) -> None:
        """Makes room for a body of so many bytes within `wait_s`; RateLimited, Unavailable."""
        more = num_bytes - FREE_BYTES - self._bytes
        if more > 0:
            await self._budget.take(self._tenant, more, wait_s=wait_s)
            self._bytes += more

    def close(self) -> None:
        """The body is needed no longer."""
        if self._bytes:
            self._budget.give_back(self._tenant, self._bytes)
            self._bytes = 0


def check_rate(received: int, seconds: float, *, grace_s: float) -> None:
    """BodyTimeout for a body that has taken room from others, and keeps it by coming slowly."""
    if seconds > grace_s + received / MIN_BYTES_PER_S:
        raise BodyTimeout(
            f"the body brought {received} bytes in {seconds:.0f} s; one of more than {FREE_BYTES} "
            f"bytes must bring {MIN_BYTES_PER_S} a second after {grace_s:g} s"
        )
