"""1.2, BEY-17, BEY-50: beyond the capacity, what is taken is done in its time, and the rest is refused at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.base.wire.request import ORDER_S, Load
from headrace.core.admission import load_of
from tests.core.harness import (
    DECODE_S,
    TOKEN_S,
    Clock,
    Driver,
    TimedDriver,
    make_request,
    make_spec,
)

ROWS, PROMPT, OUTPUT, DEADLINE_S = 8, 16, 40, 2.0
CAPACITY = 1 / (OUTPUT * DECODE_S / ROWS + PROMPT * TOKEN_S)  # requests a second
SECONDS = 20.0
LONG = pytest.mark.parametrize("seconds", [5.0, pytest.param(SECONDS, marks=pytest.mark.slow)])


class Offered:
    """Requests that come at random times, whatever becomes of them."""

    def __init__(self, level: float, *, deadline_s: float = DEADLINE_S, **scheduler: Any) -> None:
        self.driver = TimedDriver(max_step_tokens=1024, max_running=ROWS, **scheduler)
        self._random = random.Random(level)
        self._level = level
        self._deadline_s = deadline_s

    def run(self, seconds: float) -> float:
        """Requests done a second, of those the engine could do."""
        driver, end = self.driver, self.driver.clock.now + seconds
        due, id = driver.clock.now, 0
        while driver.clock.now < end:
            while due <= driver.clock.now:
                id += 1
                driver.add(self.request(id))
                due += self._random.expovariate(self._level * CAPACITY)
            if driver.core.has_work:
                driver.step()
            else:
                driver.clock.now = due
        done = [f for f in driver.finished.values() if f.error is None]
        return len(done) / (CAPACITY * seconds)

    def request(self, id: int) -> Any:
        """The request of this number."""
        return make_request(
            id, PROMPT, max_tokens=OUTPUT, min_tokens=OUTPUT, deadline_s=self._deadline_s
        )

    def errors(self, kind: str) -> list[Any]:
        """What was answered by such an error."""
        ends = self.driver.finished.values()
        return [f.error for f in ends if f.error is not None and f.error.kind == kind]


@pytest.mark.covering(0)
@pytest.mark.parametrize("seconds", [8.0, pytest.param(SECONDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
@pytest.mark.parametrize("level", [2, pytest.param(5, marks=pytest.mark.slow), 20])
def test_overload_leaves_the_throughput_as_it_is(level: float, policy: str, seconds: float) -> None:
    offered = Offered(level, policy=policy)
    assert offered.run(seconds) >= 0.95
    refused, waiting = offered.errors("QueueFull"), len(offered.driver.core.scheduler.queue)
    assert waiting <= DEADLINE_S * CAPACITY
    assert len(refused) + waiting > (0.9 * (level - 1) - 0.05) * CAPACITY * seconds


def load_now(driver: Driver) -> Load:
    return load_of(driver.core.scheduler, driver.core.counters)


@pytest.mark.slow
def test_nothing_is_refused_below_the_capacity() -> None:
    offered = Offered(0.5)
    assert offered.run(SECONDS) >= 0.45
    assert not offered.errors("QueueFull") and not offered.errors("DeadlineExceeded")


@LONG
def test_a_refusal_tells_the_predicted_wait(seconds: float) -> None:
    offered = Offered(2)
    offered.run(seconds)
    driver, id = offered.driver, 10**6
    while (load := load_now(driver)).wait_s(load.waiting) < ORDER_S:
        driver.add(make_request(id, PROMPT, max_tokens=OUTPUT))
        id += 1
    driver.add(make_request(id, PROMPT, max_tokens=OUTPUT, deadline_s=ORDER_S))
    driver.step()
    error, wait_s = driver.finished[id].error, load.wait_s(load.waiting)
    assert error is not None and error.retry_after_s is not None
    assert wait_s <= error.retry_after_s <= 1.25 * wait_s
    assert f"its time is {ORDER_S:g} s" in error.message


@LONG
def test_the_predicted_wait_is_the_one_that_comes(seconds: float) -> None:
    offered = Offered(2)
    offered.run(seconds)
    driver = offered.driver
    load, begin = load_now(driver), driver.clock.now
    driver.add(make_request(10**6, PROMPT, max_tokens=OUTPUT))
    driver.run()
    started = driver.finished[10**6].scheduled_s
    assert started == pytest.approx(load.wait_s(load.waiting), rel=0.15), begin


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [2.0, 10.0])
@pytest.mark.parametrize("level", [1, 2, 5, 20])
def test_overlapped_steps_lose_one_step_of_a_row_per_request_and_no_more(
    level: float, deadline_s: float
) -> None:
    """A row's last step is in flight while the next one is planned, which leaves the row empty."""
    offered = Offered(level, deadline_s=deadline_s, overlap=True)
    with_idle = 1 / ((OUTPUT + 1) * DECODE_S / ROWS + PROMPT * TOKEN_S)
    assert offered.run(SECONDS) >= 0.98 * with_idle / CAPACITY * (0.97 if level == 1 else 1)
    late = [f for f in offered.driver.finished.values() if f.error and f.scheduled_s is not None]
    assert len(late) <= 0.01 * len(offered.driver.finished)


def test_the_predicted_wait_counts_the_step_that_is_ahead() -> None:
    """Of short answers every ninth step was left out: those that came last were taken too late."""
    known: dict[str, Any] = {"waiting": 8, "running": 4, "rows": 4, "decode_step_s": 0.05}
    exact, ahead = (Load(**known, output_tokens=8.0, steps_ahead=steps) for steps in (0, 1))
    assert exact.wait_s(8) == pytest.approx(9 * 8 * 0.05 / 4)
    assert ahead.wait_s(8) == pytest.approx(9 * 9 * 0.05 / 4)
    assert ahead.service_s(num_prompt=1, output_tokens=8) == pytest.approx(9 * 0.05)
    assert load_now(Offered(1, overlap=True).driver).steps_ahead == 1
    assert load_now(Offered(1).driver).steps_ahead == 0


def order(*deadlines: float | None) -> list[int]:
    """The order in which requests with these deadlines start that have come at the same time."""
    driver = Driver(make_spec(max_running=1, max_queued_requests=9))
    driver.add(*(make_request(i, max_tokens=2, deadline_s=d) for i, d in enumerate(deadlines)))
    driver.run()
    return sorted(driver.finished, key=list(driver.tokens).index)


def test_what_is_due_first_starts_first() -> None:
    assert order(None, 5.0, 3.0, None, 4.0) == [2, 4, 1, 0, 3]
    assert order(None, 500.0, None) == [0, 1, 2], "deadlines so far off say nothing"


def test_nobody_is_overtaken_for_ever() -> None:
    clock = Clock()
    driver = Driver(make_spec(max_running=1), clock=clock)
    driver.add(make_request(1, max_tokens=2), make_request(2, max_tokens=2))
    driver.step()
    clock.now += ORDER_S
    driver.add(make_request(3, max_tokens=2, deadline_s=0.5))
    driver.run()
    assert list(driver.tokens) == [1, 2, 3]


@LONG
def test_what_can_no_longer_be_done_in_time_never_runs(seconds: float) -> None:
    """Its answer takes 0.16 s at least; when it could still begin it has 0.1 s."""
    offered = Offered(1)
    offered.run(seconds)
    driver = offered.driver
    driver.run()
    driver.add(*(make_request(10**6 + i, PROMPT, max_tokens=500) for i in range(ROWS)))
    driver.step()
    driver.core.counters.output_tokens_each.add(0)  # nothing is refused for its wait
    driver.add(offered.request(10**7))
    driver.clock.now += DEADLINE_S - 0.1
    driver.run()
    late = driver.finished[10**7]
    assert late.error is not None and late.error.kind == "DeadlineExceeded"
    assert late.scheduled_s is None
