"""Whether an engine core has room for one more request, as far as one front can tell by its own: the door.

A front that knows the queue to be full refuses a request by its headers, before the body is read, checked, rendered and
tokenized (reliability 1.2, P9). With several fronts each knows only a part; what passes here the core refuses.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from headrace.base.errors import Unavailable
from headrace.base.wire.request import Hello

ENDS_KEPT = 32  # the throughput is taken from the last so many ends
TOLD_KEPT = 4096  # of so many refused requests it is known when they will be back
MAX_WAIT_S = 60.0  # stock clients wait no longer


class Room:
    """Keeps count for one core. Memory is bounded by ENDS_KEPT and TOLD_KEPT."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS_KEPT)
        self._told: deque[float] = deque(maxlen=TOLD_KEPT)

    def ended(self) -> None:
        """A request has left the core."""
        self._ends.append(self._clock())

    def check(self, hello: Hello | None, in_flight: int) -> None:
        """Unavailable if the core holds as much as it takes; Retry-After is when those before will be done."""
        if hello is None or hello.max_in_flight is None or in_flight < hello.max_in_flight:
            return
        wait_s = self._wait_s(in_flight - hello.max_running)
        self._told.append(self._clock() + wait_s)
        raise Unavailable(
            f"{in_flight} requests run or wait already, at most {hello.max_in_flight} may",
            retry_after_s=wait_s,
        )

    def _wait_s(self, waiting: int) -> float:
        """The waiting ones and those told to come back, over the throughput; spread, so that not all come at once."""
        now = self._clock()
        while self._told and self._told[0] <= now:
            self._told.popleft()
        rate = 0.0
        if len(self._ends) > 1:
            rate = (len(self._ends) - 1) / max(now - self._ends[0], 1e-3)
        ahead = max(waiting, 0) + len(self._told)
        wait_s = ahead / rate if rate else 1.0
        return min(max(wait_s, 1.0) * random.uniform(1.0, 1.25), MAX_WAIT_S)
