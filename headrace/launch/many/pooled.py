"""What the pool of models (pool.py) knows of each, and what it asks of others."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.errors import EngineError, HeadraceError, Unavailable
from headrace.base.wire.models import ModelStatus

SWAP_AFTER_S = 2.0
RETRY_S = 10.0
"""A model that could not be loaded is tried again for a request that comes so much later."""
MAX_WAITING = 512
"""Requests that may wait for one model; more are refused at once."""
AT_REST = frozenset({ModelStatus.UNLOADED, ModelStatus.FAILED, ModelStatus.ASLEEP})
"""States in which a model takes nothing of the budget."""
LEAVING = frozenset({ModelStatus.SLEEPING, ModelStatus.UNLOADING})


@dataclass(eq=False)
class WaitingRequest:
    """A request that needs a model, or (`leases` false) somebody who wants it loaded."""

    client: int
    number: int
    since: float
    ids: tuple[str, ...] = ()
    tenant: str = ""
    leases: bool = True


@dataclass(eq=False)
class PooledModel:
    """One model. `num_bytes`: its need while it is loaded; `sleep_bytes` while it sleeps (None: it
    never sleeps). `leases`: how often it was granted, by API process; `closed`: it takes no new
    requests; `unloads`: who waits for it to be unloaded. `keep_alive_s`: as the last request
    wanted it (infinite: for ever)."""

    index: int
    name: str
    num_bytes: int
    sleep_bytes: int | None = None
    pinned: bool = False
    priority: int = 0
    default_keep_alive_s: float = math.inf
    status: ModelStatus = ModelStatus.UNLOADED
    since: float = 0.0
    error: HeadraceError | None = None
    load_s: float | None = None
    used_at: float = 0.0
    keep_alive_s: float = math.inf
    closed: bool = False
    leases: Counter[int] = field(default_factory=Counter)
    waiting: deque[WaitingRequest] = field(default_factory=deque)
    unloads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether no request uses it."""
        return not self.leases

    @property
    def expires_at(self) -> float:
        """When it is unloaded unless it is used."""
        held = self.pinned or not self.idle or bool(self.waiting)
        return math.inf if held else self.used_at + self.keep_alive_s


class PoolActions(Protocol):
    """What the pool asks of those who have processes and sockets. The first four are answered by an
    event of the pool, never from within."""

    def load(self, model: PooledModel) -> None:
        """Starts its core: `loaded` or `failed` follows."""
        ...

    def end(self, model: PooledModel) -> None:
        """Ends its core: `ended` follows."""
        ...

    def sleep(self, model: PooledModel) -> None:
        """Has its core fall asleep: `asleep` follows, or `ended` where it cannot."""
        ...

    def wake(self, model: PooledModel) -> None:
        """Wakes its core: `loaded` follows, or `ended` where it cannot."""
        ...

    def reply(
        self, client: int, number: int, *, result: object = None, error: HeadraceError | None = None
    ) -> None:
        """Answers an API process."""
        ...

    def announce_closed(self, model: PooledModel) -> None:
        """Tells every API process that new requests to it are to ask first."""
        ...

    def announce_gone(self, model: PooledModel) -> None:
        """Tells every API process that its core has ended."""
        ...


def load_error(name: str, why: str, *, broken: bool) -> HeadraceError:
    """What the callers of a model that could not be loaded are answered: 500 where its files or
    options are wrong (`broken`), else 503."""
    text = f"model: {name!r} could not be loaded: {why}"
    return EngineError(text) if broken else Unavailable(text, retry_after_s=RETRY_S)
