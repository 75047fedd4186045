"""The alarm for a lagging event loop, on a clock of its own."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.base.telemetry.metrics import Metrics
from headrace.front.server.http.event_loop import PERIOD_S, QUIET_S, LoopSigns, watch_event_loop


async def watched(late: list[float]) -> str:
    """The metrics after timers that were so late."""
    now, lags, metrics = 100.0, list(late), Metrics()

    async def sleep(seconds: float) -> None:
        nonlocal now
        if not lags:
            raise asyncio.CancelledError
        now += seconds + lags.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await watch_event_loop(metrics, LoopSigns(), clock=lambda: now, sleep=sleep)
    return metrics.exposition([]).decode()


async def test_lags_are_measured_and_long_ones_raise_the_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        text = await watched([0.0, 0.002, 0.3, 2.0])
    assert "headrace_event_loop_lag_seconds_count 4.0" in text
    assert "headrace_event_loop_alarms_total 2.0" in text
    assert len(caplog.records) == 1, "the log says it once in a while"
    assert "busy for 0.30 s" in caplog.records[0].getMessage()


async def test_the_log_says_it_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    quiet = [0.0] * int(QUIET_S / PERIOD_S)
    with caplog.at_level(logging.WARNING):
        await watched([1.0, *quiet, 1.0])
    assert len(caplog.records) == 2
