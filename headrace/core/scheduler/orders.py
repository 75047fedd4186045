"""Orders of the waiting requests that are found anew for every step: by what the prefix cache holds
of them, or by what runs. The first SORTED that are due are ranked, all others follow; a request
that MAX_OVERTAKEN others have overtaken is due before all that are not, so that none starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import msgspec

from headrace.base.config.resolved import SchedulerSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.retention import ROUTING_KEY
from headrace.core.ports import AdmissionHook, AdmissionVerdict, none_computed
from headrace.core.request import Request
from headrace.core.scheduler.fair_queue import FairQueue
from headrace.core.scheduler.queue import Key, OrderedQueue, Queue, key_of

SORTED = 128
MAX_OVERTAKEN = 64
MAX_KEY_CHARS = 128
Match = Callable[[Request], int]
"""How many blocks of a request the prefix cache holds."""


Rank = Callable[[list[Request]], Sequence[tuple[object, ...]]]
"""An order: the rank of each of these waiting requests, the lowest first."""


def longest_match(match: Match) -> Rank:
    """lpm: whose prefix the cache holds most of."""
    return lambda waiting: [(-match(request),) for request in waiting]


def depth_first(match: Match) -> Rank:
    """dfs-weight: down the tree of cached prefixes, the branch under which most requests wait first
    (of equal ones that of the request which is due first), and what lies deeper before what ends
    above it: a branch is made use of while it is there."""

    def rank(waiting: list[Request]) -> list[tuple[object, ...]]:
        paths = [request.chain[: match(request)] for request in waiting]
        weight = Counter(digest for path in paths for digest in path)
        due: dict[bytes, tuple[int, ...]] = {}
        for request, path in zip(waiting, paths, strict=True):
            for digest in path:
                due[digest] = min(request.key, due.get(digest, request.key))
        return [
            (*((0, -weight[digest], due[digest], digest) for digest in path), (1,))
            for path in paths
        ]

    return rank


def routing_key(request: Request) -> str:
    """The request's key, "" without one."""
    raw = request.wire.hook_payloads.get(ROUTING_KEY)
    return "" if raw is None else msgspec.msgpack.decode(raw, type=str)


def check_routing_key(raw: msgspec.Raw) -> None:
    """InvalidRequest where it is no text of a sensible length."""
    try:
        key = msgspec.msgpack.decode(raw, type=str)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{ROUTING_KEY}: {error}", field=ROUTING_KEY) from None
    if not 0 < len(key) <= MAX_KEY_CHARS:
        why = f"{ROUTING_KEY}: {len(key)} characters, 1 to {MAX_KEY_CHARS} are wanted"
        raise InvalidRequest(why, field=ROUTING_KEY)


class RankedQueue(OrderedQueue):
    """See Queue and the top of the file. Positions are those of the requests as they are due."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self._overtaken: dict[int, int] = {}

    def remove(self, request: Request) -> None:
        """See Queue."""
        for passed in self._items[: min(self.position(request), SORTED)]:
            self._overtaken[passed.id] = self._overtaken.get(passed.id, 0) + 1
        super().remove(request)
        self._overtaken.pop(request.id, None)

    def scan(self) -> Iterator[Request]:
        """See Queue."""
        first, rest = self._items[:SORTED], self._items[SORTED:]
        urgent = [r for r in first if self._overtaken.get(r.id, 0) >= MAX_OVERTAKEN]
        others = [r for r in first if self._overtaken.get(r.id, 0) < MAX_OVERTAKEN]
        ranks = dict(zip(map(id, others), self._rank(others), strict=True))
        yield from urgent
        yield from sorted(others, key=lambda request: (ranks[id(request)], request.key))
        yield from rest

    def quantiles(self, count: int) -> list[Request]:
        """See Queue."""
        return []


class RoutingQueue(RankedQueue):
    """routing-key: requests whose key most of the running ones have go first."""

    def __init__(self) -> None:
        super().__init__(self._by_running)
        self._running: Counter[str] = Counter()

    def _by_running(self, waiting: list[Request]) -> list[tuple[object, ...]]:
        counts = self._running
        return [(-counts[key] if (key := routing_key(r)) else 0,) for r in waiting]

    def started(self, request: Request) -> None:
        """See Queue."""
        self._running[routing_key(request)] += 1

    def ended(self, request: Request) -> None:
        """See Queue."""
        self._running[routing_key(request)] -= 1


class RoutingKeys(AdmissionHook):
    """Checks the keys of requests, which are read by `routing_key`."""

    name = ROUTING_KEY

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        if (raw := request.hook_payloads.get(ROUTING_KEY)) is not None:
            check_routing_key(raw)
        return AdmissionVerdict("yes")

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        return AdmissionVerdict("yes")

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook."""

    def renew(self) -> None:
        """See AdmissionHook."""

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook."""
        return True


def order_of(spec: SchedulerSpec, *, num_rows: int, match: Match) -> tuple[Queue, Key]:
    """An empty queue for the policy, and the order of running requests."""
    return _queue_of(spec, num_rows, match), key_of(spec.policy)


def _queue_of(spec: SchedulerSpec, num_rows: int, matched: Match) -> Queue:
    match spec.policy:
        case "fair-adapters":
            return FairQueue(num_rows, {}, attrgetter("adapter.name"))
        case "fair":
            return FairQueue(num_rows, spec.tenant_weights)
        case "lpm":
            return RankedQueue(longest_match(matched))
        case "dfs-weight":
            return RankedQueue(depth_first(matched))
        case "routing-key":
            return RoutingQueue()
        case _:
            return OrderedQueue()
