"""The waiting requests in the order in which they are tried.

A request that is tried and cannot run stays where it is, so that any subset may be skipped in any
step and the order of the rest is kept. A request that comes back after a preemption takes the place
its key gives it. The policy says the key (a smaller one goes first); queues of another kind:
fair_queue.py, orders.py.

And the optional conditions on running one of them, together (`AdmissionHooks`): a hook that raises
ends the request, not the loop.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError, InvalidRequest, Unsupported, from_wire, to_wire
from headrace.base.wire.request import EngineRequest, order_s
from headrace.base.wire.retention import RETENTION, ROUTING_KEY
from headrace.base.wire.transfer import TRANSFER_HOOK
from headrace.core.ports import AdmissionHook, Ends, none_computed
from headrace.core.request import Request

_key = attrgetter("key")
_log = logging.getLogger(__name__)
_ABSENT = {
    TRANSFER_HOOK: (
        "kv_transfer_params",
        "the KV of this server's prompts passes to no other: start it with --kv-transfer-path FOLDER",
    ),
    RETENTION: (RETENTION, "this server keeps no priorities of KV: start it with --kv-retention"),
    ROUTING_KEY: (ROUTING_KEY, "this server orders its queue otherwise: --policy routing-key"),
}
"""By hook, the field of a request that wants it and why it is not there."""


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


class AdmissionHooks:
    """All hooks of a core, asked in order."""

    def __init__(self, hooks: Sequence[AdmissionHook]) -> None:
        self._hooks = tuple(hooks)
        self._failed: Ends = {}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all hooks."""
        return tuple(hook.name for hook in self._hooks)

    def admit(self, request: EngineRequest) -> None:
        """Lets every hook see a new request. Raises if one says never (those that had admitted it
        are told its end)."""
        unknown = sorted(request.hook_payloads.keys() - {hook.name for hook in self._hooks})
        if unknown:
            if unknown[0] in _ABSENT:
                field, why = _ABSENT[unknown[0]]
                raise Unsupported(f"{field}: {why}", field=field)
            raise InvalidRequest(
                f"this engine has no {unknown[0]!r}", field=f"hook_payloads.{unknown[0]}"
            )
        for index, hook in enumerate(self._hooks):
            try:
                verdict = hook.admit(request)
                if verdict.answer == "never":
                    raise InvalidRequest(verdict.reason)
            except Exception:
                for admitted in self._hooks[:index]:
                    admitted.finish(request.id)
                raise

    def refusal(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> tuple[str | None, HeadraceError | None]:
        """Why the request may not run now (None: it may), and the error if it may never."""
        for hook in self._hooks:
            try:
                verdict = hook.ready(request_id, computed)
            except Exception as error:
                return f"{hook.name}: failed", _as_ours(error)
            if verdict.answer != "yes":
                never = InvalidRequest(verdict.reason) if verdict.answer == "never" else None
                return f"{hook.name}: {verdict.reason}", never
        return None, None

    def payloads(self, request_ids: list[int]) -> dict[str, bytes]:
        """What the workers need for a step, by hook."""
        payloads = {hook.name: hook.payload(request_ids) for hook in self._hooks}
        return {name: payload for name, payload in payloads.items() if payload is not None}

    def deferring(self, request_ids: list[int]) -> tuple[str, ...]:
        """The hooks whose deferred payload a step with these requests must wait for."""
        return tuple(hook.name for hook in self._hooks if hook.defers(request_ids))

    def deferred_payloads(
        self,
        names: tuple[str, ...],
        rows: npt.NDArray[np.int32],
        request_ids: list[int],
        drafts: Sequence[npt.NDArray[np.int32]],
    ) -> dict[str, memoryview]:
        """The deferred payloads of these hooks. Where one raises, the requests that it defers end
        with their next token."""
        payloads: dict[str, memoryview] = {}
        for hook in self._hooks:
            if hook.name not in names:
                continue
            try:
                payloads[hook.name] = hook.deferred_payload(rows, request_ids, drafts)
            except Exception as error:
                self._failed |= self._end_deferred(hook, request_ids, error)
        return payloads

    def _end_deferred(self, hook: AdmissionHook, request_ids: list[int], error: Exception) -> Ends:
        """The requests of a step that a hook looks after end, as it failed over one of them."""
        _log.error("hook %s failed in a step", hook.name, exc_info=error)
        return {i: _as_ours(error) for i in request_ids if hook.defers([i])}

    def follow_drafts(self, request: EngineRequest) -> bool:
        """Whether all hooks that look after the request follow drafts."""
        payloads = request.hook_payloads
        return all(hook.follows_drafts for hook in self._hooks if hook.name in payloads)

    def forced(self) -> dict[int, list[int]]:
        """See AdmissionHook; one hook at most forces."""
        forced: dict[int, list[int]] = {}
        for hook in self._hooks:
            forced |= hook.forced()
        return forced

    def accept_tokens(self, request_ids: list[int], tokens: list[int]) -> Ends:
        """Tells every hook the new tokens; the requests that end with theirs."""
        ends: Ends = {}
        for hook in self._hooks:
            try:
                ends |= hook.accept_tokens(request_ids, tokens)
            except Exception as error:
                ends |= self._end_deferred(hook, request_ids, error)
        if self._failed:
            ends |= {i: self._failed.pop(i) for i in request_ids if i in self._failed}
        return ends

    def renew(self) -> None:
        """Tells every hook that other workers have taken over."""
        for hook in self._hooks:
            hook.renew()

    def renew_content(self) -> None:
        """Tells every hook that the workers' weights are others."""
        for hook in self._hooks:
            hook.renew_content()

    @property
    def num_held(self) -> int:
        """Requests that hooks keep something for; 0 at rest."""
        return sum(hook.num_held for hook in self._hooks)

    def figures(self) -> dict[str, int]:
        """What all hooks have counted."""
        return {name: number for hook in self._hooks for name, number in hook.figures().items()}

    def finish(self, request_id: int) -> None:
        """The request has ended; every hook is told, even if one of them fails."""
        self._failed.pop(request_id, None)
        for hook in self._hooks:
            try:
                hook.finish(request_id)
            except Exception:
                _log.exception("hook %s failed at the end of a request", hook.name)


def _as_ours(error: Exception) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else from_wire(to_wire(error))
