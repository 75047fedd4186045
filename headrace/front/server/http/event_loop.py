"""An alarm for an event loop that lags: everything that streams waits while one callback runs long,
and nothing else would say so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from headrace.base.telemetry.metrics import Metrics

PERIOD_S = 0.5
ALARM_S = 0.25
QUIET_S = 30.0  # between two lines of the log
log = logging.getLogger(__name__)


class LoopSigns:
    """When the event loop last gave a sign of life; read from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at: float | None = None

    def give(self) -> None:
        """The loop turns."""
        self._seen_at = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign; 0 before the first."""
        return 0.0 if self._seen_at is None else self._clock() - self._seen_at


async def watch_event_loop(
    metrics: Metrics,
    signs: LoopSigns,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Measures for ever how late a timer of this loop is; from ALARM_S on it counts, and is
    logged."""
    logged_at = -QUIET_S
    while True:
        due = clock() + PERIOD_S
        await sleep(PERIOD_S)
        now = clock()
        signs.give()
        lag_s = max(0.0, now - due)
        metrics.observe("headrace_event_loop_lag_seconds", lag_s)
        if lag_s < ALARM_S:
            continue
        metrics.add("headrace_event_loop_alarms_total")
        if now - logged_at >= QUIET_S:
            logged_at = now
            log.warning("the event loop was busy for %.2f s: every stream waited so long", lag_s)
