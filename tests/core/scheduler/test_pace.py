"""How much prefill joins decodes: measured, bounded, never starved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headrace.base.wire.step import StepPlan
from headrace.core.scheduler.pace import PROBE_STEPS, Pace
from tests.core.harness import Clock, Driver, make_request, make_spec

DECODE_S, TOKEN_S = 0.004, 0.0001


def learned(stretch: float | None = 2.0) -> Pace:
    """A pace that has seen both kinds of step: 40 prefill tokens take as long as a step of decodes."""
    pace = Pace(stretch, max_tokens=256, block_tokens=16)
    now = 10.0
    for _ in range(50):
        pace.landed(now, now + DECODE_S, decodes=8, prefill_tokens=0)
        pace.landed(now + 1, now + 1 + DECODE_S + 32 * TOKEN_S, decodes=8, prefill_tokens=32)
        now += 2
    pace.landed(now, now + DECODE_S, decodes=8, prefill_tokens=0)
    return pace


def test_prefill_takes_as_long_as_the_stretch_leaves_it() -> None:
    assert learned().allowance(8) == 32  # 40, in whole blocks
    assert learned(4.0).allowance(8) == 112


def test_without_decodes_or_without_a_stretch_prefill_is_not_bounded() -> None:
    assert learned().allowance(0) == 256
    assert learned(None).allowance(8) == 256


def test_before_anything_is_measured_a_part_of_the_budget_joins() -> None:
    assert Pace(2.0, max_tokens=256, block_tokens=16).allowance(1) == 32


def test_prefill_that_is_slow_beside_decodes_still_gets_a_block() -> None:
    pace = learned()
    for at in range(100):
        pace.landed(500.0 + at, 500.9 + at, decodes=8, prefill_tokens=16)
        pace.landed(500.95 + at, 500.95 + at + DECODE_S, decodes=8, prefill_tokens=0)
    assert pace.allowance(8) == 16


def test_now_and_then_a_step_is_left_to_the_decodes() -> None:
    """Their own time would otherwise not be known any more while prefill never ends."""
    pace = learned()
    for at in range(PROBE_STEPS):
        assert pace.allowance(8) > 0
        pace.landed(500.0 + at, 500.007 + at, decodes=8, prefill_tokens=32)
    assert pace.allowance(8) == 0
    pace.landed(600.0, 600.004, decodes=8, prefill_tokens=0)
    assert pace.allowance(8) == 32


def test_a_step_held_up_by_something_else_hardly_counts() -> None:
    pace = learned()
    pace.landed(500.0, 505.0, decodes=8, prefill_tokens=0)
    assert pace.allowance(8) <= 48


def test_a_step_that_was_queued_counts_from_the_end_of_the_one_before() -> None:
    pace = Pace(2.0, max_tokens=256, block_tokens=1)
    pace.landed(0.0, 10.0, decodes=1, prefill_tokens=0)
    for at in range(200):  # submitted long before it could begin
        pace.landed(5.0, 10.0 + (at + 1) * DECODE_S, decodes=1, prefill_tokens=0)
    pace.landed(20.0, 20.0 + 10 * TOKEN_S, decodes=0, prefill_tokens=10)
    assert pace.allowance(1) == pytest.approx(DECODE_S / TOKEN_S, abs=1)


class TimedDriver(Driver):
    """A core whose steps take the time a device would: so much for the decodes, so much for each prefill token."""

    def __init__(self, **scheduler: Any) -> None:
        spec = make_spec(
            num_blocks=600, block_tokens=16, max_model_len=4096, overlap=False, **scheduler
        )
        super().__init__(spec, check=False)
        assert isinstance(self.clock, Clock)
        self.steps: list[tuple[int, int]] = []
        submit = self.executor.submit

        def timed(plan: StepPlan) -> Any:
            decodes = int((plan.num_tokens == 1).sum())
            prefill = int(plan.num_tokens.sum()) - decodes
            self.steps.append((decodes, prefill))
            pending = submit(plan)
            self.clock.now += DECODE_S * (decodes > 0) + TOKEN_S * prefill
            return pending

        self.executor.submit = timed


@pytest.mark.parametrize("stretch", [None, 2.0])
def test_a_long_prompt_does_not_stall_running_streams(stretch: float | None) -> None:
    driver = TimedDriver(max_step_tokens=1024, decode_stretch=stretch)
    driver.add(*(make_request(i, 8, max_tokens=400) for i in range(4)))
    for _ in range(20):
        driver.step()
    driver.add(make_request(9, 3000, max_tokens=1))
    since = len(driver.steps)
    while 9 not in driver.finished:
        assert len(driver.steps) < since + 400
        driver.step()
    mixed = [prefill for decodes, prefill in driver.steps[since:] if decodes and prefill]
    longest = max(DECODE_S + TOKEN_S * prefill for prefill in mixed)
    if stretch is None:
        assert longest > 20 * DECODE_S
    else:
        assert longest <= stretch * DECODE_S
        assert sum(mixed) / len(mixed) >= 0.75 * DECODE_S / TOKEN_S  # and prefill gets its share


def test_prompts_alone_use_the_whole_step() -> None:
    driver = TimedDriver(max_step_tokens=1024, decode_stretch=2.0)
    driver.add(make_request(1, 3000, max_tokens=1))
    driver.run()
    assert [prefill for _, prefill in driver.steps if prefill] == [1024, 1024, 952]


def test_prefill_goes_on_while_decodes_never_stop() -> None:
    """Nothing starves: each of many prompts is answered although there is always somebody who decodes."""
    driver = TimedDriver(max_step_tokens=64, decode_stretch=1.1, max_running=4)
    driver.add(*(make_request(i, 200, max_tokens=50) for i in range(12)))
    for _ in itertools.takewhile(lambda _: driver.core.has_work, range(5000)):
        driver.step()
    assert len(driver.finished) == 12
