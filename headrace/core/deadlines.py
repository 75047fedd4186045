"""When requests must be finished: a heap of deadlines, forgotten lazily."""

from __future__ import annotations

import heapq
from collections.abc import Container

SLACK = 1024  # entries of ended requests that may stay behind


class Deadlines:
    """Pairs (due, request id). An entry may outlive its request; `expired` may return such ids."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float | None:
        """The earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def add(self, due: float, request_id: int) -> None:
        """Remembers a deadline."""
        heapq.heappush(self._heap, (due, request_id))

    def forget_ended(self, alive: Container[int], *, num_alive: int) -> None:
        """Drops the entries of ended requests once they are most of the heap."""
        if len(self._heap) > 2 * num_alive + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[int]:
        """Takes out the requests whose time is over."""
        ids: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids
