"""Nothing runs although requests wait: for what they wait, who could give it, and the way out.

The scheduler notes with every request why it does not run; this reads those reasons when a plan
came out empty with nothing in flight. Where somebody else can open the way (an admission hook, a
copy of KV that is under way), the wait is told of. Where nobody can, it is a fault of this engine:
health fails, and after that one request after the other is ended with what it lacks, so that those
behind it can begin.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.base.errors import EngineError, WireError, to_wire
from headrace.core.request import Request
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.service_state import Counters, ServiceState
from headrace.core.weights import Weights

log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""A stall that has lasted so long is told of."""
POLL_S = 0.002
"""How often admission hooks are asked again while nothing runs."""
MAX_NAMED = 3  # requests named for each resource


@dataclass(frozen=True)
class Stall:
    """`resources`: what is waited for, the first words of the reasons. `is_lost`: nobody is there
    who could give it."""

    text: str
    resources: tuple[str, ...]
    is_lost: bool


def stall_of(reasons: Iterable[tuple[str, str]], others: Collection[str]) -> Stall | None:
    """What (name, reason) of requests say, none of which runs; None without any. `others`: the
    resources that somebody beside the scheduler gives."""
    waiting: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, reason in reasons:
        resource, _, rest = reason.partition(":")
        waiting[resource].append((name, rest.strip()))
    if not waiting:
        return None
    parts: list[str] = []
    for resource, each in waiting.items():
        named = ", ".join(name for name, _ in each[:MAX_NAMED])
        more = f" and {len(each) - MAX_NAMED} more" if len(each) > MAX_NAMED else ""
        parts.append(f"{resource}: {each[0][1] or 'no reason was noted'} ({named}{more})")
    text = "nothing runs and nothing can begin, because requests wait for " + "; ".join(parts)
    is_lost = not any(resource in others for resource in waiting)
    return Stall(text, tuple(waiting), is_lost)


class StallEngine(Protocol):
    """What is asked of the engine core."""

    service: ServiceState
    counters: Counters
    hooks: AdmissionHooks
    weights: Weights
    clock: Callable[[], float]

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler and its queue."""
        ...

    def put_back_all(self, reason: str) -> None:
        """Takes rows and blocks from all running requests."""
        ...

    def end(self, request: Request, reason: str, *, error: WireError | None = None) -> None:
        """Ends a request."""
        ...


class StallWatch:
    """The stalls of one core. `at`: when the last plan came out empty with nothing in flight; None:
    it is to be made again. `stall`: the one told of last. `count`: those told of since the start.
    `reason_of`: why a request does not run."""

    def __init__(self, engine: StallEngine, reason_of: Callable[[Request], str]) -> None:
        self._engine, self._reason_of = engine, reason_of
        self.at: float | None = None
        self.stall: Stall | None = None
        self.count = 0
        self._since = engine.clock()
        self._steps = 0

    @property
    def now(self) -> Stall | None:
        """The stall that goes on: no step has run since, and requests are there."""
        scheduler = self._engine.scheduler
        ran = self._engine.counters.steps != self._steps
        return None if ran or not (scheduler.queue or scheduler.num_running) else self.stall

    @property
    def text(self) -> str:
        """What the stall that goes on is; "" without one."""
        stall = self.now
        return "" if stall is None else stall.text

    @property
    def seconds(self) -> float:
        """How long the stall that is told of has lasted; 0 without one."""
        return 0.0 if self.now is None else self._engine.clock() - self._since

    def look_again_at(self, *, hooks: bool) -> float | None:
        """When a plan is to be made again although nothing has come."""
        assert self.at is not None
        if hooks:
            return self.at + POLL_S
        return None if self.stall is not None else self._since + PATIENCE_S

    def note(self) -> None:
        """A plan came out empty, and nothing is in flight."""
        engine = self._engine
        self.at = now = engine.clock()
        requests = [*engine.scheduler.running(), *engine.scheduler.queue]
        oldest = min((request.since for request in requests), default=now)
        if not requests or engine.counters.steps != self._steps or oldest > self._since:
            self._steps, self._since, self.stall = engine.counters.steps, now, None
        if now < self._since + PATIENCE_S or engine.service.mode is not None:
            return
        reasons = [(_name(request), self._reason_of(request)) for request in requests]
        stall = stall_of(reasons, engine.hooks.names)
        if stall is None:
            return
        if self.stall is None or self.stall.resources != stall.resources:
            self.count += 1
            log.log(logging.ERROR if stall.is_lost else logging.WARNING, "%s", stall.text)
        self.stall = stall
        if stall.is_lost and engine.weights.poll_at is None:
            self._resolve(stall)

    def _resolve(self, stall: Stall) -> None:
        """Rows that are held and do not run are given back; then the first request ends."""
        engine = self._engine
        if engine.scheduler.num_running:
            engine.put_back_all("stalled: computed again, as nothing ran")
            return
        first = next(iter(engine.scheduler.queue.scan()))
        engine.end(first, "error", error=to_wire(EngineError(stall.text)))


def _name(request: Request) -> str:
    return request.wire.label or f"request {request.id}"
