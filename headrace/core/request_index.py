"""The requests in flight, by engine id, by the ids people know (the server's label and the id the
client chose), and by deadline. One public id may stand for several requests (`n`, several prompts).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator

from headrace.core.request import Request

PROMPT_DIGITS = 7  # shorter than the random part of an id, which might have digits alone


class RequestIndex:
    """All accepted requests that have not ended.

    Invariants: `_by_label` has exactly the non-empty labels and external ids of those in `_by_id`,
    `_prompt_tokens` exactly their tenants.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        self._by_label: dict[str, dict[int, Request]] = {}
        self._prompt_tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: int) -> Request:
        return self._by_id[request_id]

    def get(self, request_id: int) -> Request | None:
        """The request with this engine id, if it is in flight."""
        return self._by_id.get(request_id)

    def prompt_tokens_of(self, tenant: str) -> int:
        """Prompt tokens of all requests of one tenant."""
        return self._prompt_tokens.get(tenant, 0)

    def add(self, request: Request) -> None:
        """A request has been accepted."""
        self._by_id[request.id] = request
        self._prompt_tokens[request.wire.tenant] += request.num_prompt
        for label in _labels(request):
            self._by_label.setdefault(label, {})[request.id] = request

    def remove(self, request: Request) -> None:
        """The request has ended."""
        del self._by_id[request.id]
        self._prompt_tokens[request.wire.tenant] -= request.num_prompt
        if not self._prompt_tokens[request.wire.tenant]:
            del self._prompt_tokens[request.wire.tenant]
        for label in _labels(request):
            requests = self._by_label[label]
            del requests[request.id]
            if not requests:
                del self._by_label[label]

    def find(self, labels: Iterable[str] | None, *, tenant: str | None = None) -> list[Request]:
        """The requests with these public ids (None: all), of one tenant if one is named. A label
        also finds those of its single prompts, `LABEL-0`, `LABEL-1` and so on."""
        if labels is None:
            matches = self._by_id
        else:
            matches = dict[int, Request]()
            for label in labels:
                matches |= self._by_label.get(label, {})
        return [request for request in matches.values() if tenant in (None, request.wire.tenant)]


def _labels(request: Request) -> set[str]:
    """The public ids of a request; that of several prompts ends in the number of this one."""
    label = request.wire.label
    stem, _, number = label.rpartition("-")
    names = {label, request.wire.external_id}
    if stem and number.isdigit() and len(number) < PROMPT_DIGITS:
        names.add(stem)
    return names - {""}


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
