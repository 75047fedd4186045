"""CoreLoop: what arrives while a step runs, on a real core with the null executor."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest

from headrace.base.wire.request import AbortRequests, Load, ToFront, TokenBatch
from headrace.base.wire.step import RecordedGraphs, StepPlan
from headrace.core.ports import Pending
from headrace.core.reports import status
from headrace.launch.core_process import CoreLoop
from headrace.launch.frontend_connections import FrontendConnections, Incoming
from headrace.launch.watchdog import Watchdog
from tests.core.harness import Driver, make_request, make_spec

FRONTEND = 3


class ScriptedFrontends:
    """Each `take` returns the next entry of `arrivals`: one when a turn begins, one more when the
    step it waits for is done."""

    def __init__(self) -> None:
        self.arrivals: deque[list[Incoming]] = deque()
        self.sent: list[TokenBatch] = []
        self.loads: list[Load] = []

    def take(self, *, block: bool, at_most_s: float | None) -> list[Incoming]:
        assert not block or self.arrivals, "the loop would wait for ever"
        return self.arrivals.popleft() if self.arrivals else []

    def send(self, frontend: int, message: ToFront) -> None:
        assert frontend == FRONTEND and isinstance(message, TokenBatch)
        self.sent.append(message)

    def send_all(self, message: ToFront) -> None:
        assert isinstance(message, Load)
        self.loads.append(message)


class IdleWatchdog:
    since: float | None = None


def loop_on(driver: Driver) -> tuple[CoreLoop, ScriptedFrontends]:
    frontends = ScriptedFrontends()
    watchdog = cast(Watchdog, IdleWatchdog())
    return CoreLoop(driver.core, cast(FrontendConnections, frontends), watchdog), frontends


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("turns", [2, 5])
def test_an_abort_that_arrives_during_a_step_gets_none_of_its_tokens(
    overlap: bool, turns: int
) -> None:
    """Defect: tokens were computed and counted after the client had left."""
    driver = Driver(make_spec(overlap=overlap))
    loop, frontends = loop_on(driver)
    frontends.arrivals.append([(FRONTEND, make_request(1, max_tokens=40))])
    for _ in range(turns):
        loop.turn()
    count = driver.core.counters.output_tokens
    assert count > 0
    frontends.sent.clear()
    frontends.arrivals += [[], [(FRONTEND, AbortRequests((1,)))]]
    loop.turn()
    assert [len(batch.tokens) for batch in frontends.sent] == [0]
    assert [(end.id, end.reason) for end in frontends.sent[0].finished] == [(1, "abort")]
    frontends.arrivals.append([(FRONTEND, make_request(1, max_tokens=3))])  # free again
    loop.turn()
    while driver.core.has_work:
        loop.turn()
    assert driver.core.counters.output_tokens == count + 3
    assert frontends.sent[-1].finished[0].reason == "length"
    driver.assert_at_rest()


def test_what_arrives_during_a_step_keeps_its_order() -> None:
    driver = Driver(make_spec())
    loop, frontends = loop_on(driver)
    frontends.arrivals.append([(FRONTEND, make_request(1, max_tokens=40))])
    for _ in range(3):
        loop.turn()
    during = [make_request(2, max_tokens=40), AbortRequests((2,)), make_request(3, max_tokens=4)]
    frontends.arrivals += [[], [(FRONTEND, message) for message in during]]
    loop.turn()
    frontends.arrivals.append([(FRONTEND, AbortRequests((1,)))])
    loop.turn()
    while driver.core.has_work:
        loop.turn()
    ends = [(end.id, end.reason) for batch in frontends.sent for end in batch.finished]
    assert sorted(ends) == [(1, "abort"), (2, "abort"), (3, "length")]
    driver.assert_at_rest()


@pytest.mark.parametrize("overlap", [True, False])
def test_who_is_refused_does_not_wait_for_a_step(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.2: refusals of the core took one to two steps, 50 to 100 ms where a step takes 50."""
    driver = Driver(make_spec(max_running=1, max_queued_requests=0, overlap=overlap))
    loop, frontends = loop_on(driver)
    frontends.arrivals.append([(FRONTEND, make_request(1, max_tokens=40))])
    for _ in range(3):
        loop.turn()
    sent_at_submit: list[list[int]] = []
    submit = driver.core.executor.submit

    def watched(plan: StepPlan) -> Pending:
        sent_at_submit.append([end.id for batch in frontends.sent for end in batch.finished])
        return submit(plan)

    monkeypatch.setattr(driver.core.executor, "submit", watched)
    frontends.arrivals.append([(FRONTEND, make_request(2, max_tokens=40))])
    loop.turn()
    assert sent_at_submit == [[2]]
    while driver.core.has_work:
        loop.turn()
    ends = [end.id for batch in frontends.sent for end in batch.finished]
    assert ends == [2, 1], "each end is told once"


def test_graphs_are_recorded_one_at_a_time_while_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a request that comes waits for one recording at most."""
    driver, recorded = Driver(make_spec()), [0]
    loop, frontends = loop_on(driver)

    def record() -> RecordedGraphs:
        recorded[0] += 1
        return RecordedGraphs(
            count=recorded[0], num_bytes=recorded[0] << 20, more=recorded[0] % 3 != 0
        )

    monkeypatch.setattr(driver.core.executor, "record_graph", record)
    for count in (1, 2):
        frontends.arrivals.append([])
        loop.turn()
        assert recorded == [count]
    frontends.arrivals.append([(FRONTEND, make_request(1, max_tokens=3))])
    loop.turn()
    while driver.core.has_work:
        loop.turn()
    assert recorded == [2]
    for count in (3, 3, 3):
        frontends.arrivals.append([])
        loop.turn()
        assert recorded == [count]
    figures = driver.core.graphs
    assert (figures.count, figures.num_bytes) == (3, 3 << 20)
    assert status(driver.core)["graph_bytes"] == 3 << 20


def test_what_waits_is_published_until_nothing_does() -> None:
    """1.2: whoever takes requests knows what they would wait for."""
    driver = Driver(make_spec(max_running=1))
    loop, frontends = loop_on(driver)
    requests = [(FRONTEND, make_request(i, 6, max_tokens=3, deadline_s=9.0)) for i in range(1, 4)]
    frontends.arrivals.append(list(requests))
    loop.turn()
    assert [(load.waiting, load.waiting_tokens, load.running) for load in frontends.loads] == [
        (3, 18, 0)
    ], "before the step: what comes during it is not counted, and is taken as sent after it"
    assert frontends.loads[0].dues == pytest.approx((9.0, 9.0, 9.0))
    while driver.core.has_work:
        loop.turn()
    assert frontends.loads[-1].waiting == 0
    assert frontends.loads[-1].output_tokens > 0
