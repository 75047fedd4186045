"""Bounds on prompts that are computed in part, on the chunks of long ones (ENG-11), and on prefill beside decodes:
measured, bounded, never starved.
"""

from __future__ import annotations

import itertools

import pytest

from headrace.base.wire.step import StepPlan
from headrace.core.scheduler.budget import (
    PROBE_STEPS,
    PrefillBudgetModel,
)
from tests.core.harness import DECODE_S, TOKEN_S, Driver, TimedDriver, make_request, make_spec


def driver_of(**scheduler: int) -> tuple[Driver, list[list[int]]]:
    """A driver, and the prefill tokens of each row in each of its steps."""
    driver = Driver(make_spec(num_blocks=400, max_step_tokens=64, **scheduler))
    chunks: list[list[int]] = []
    submit = driver.executor.submit

    def recorded(plan: StepPlan) -> object:
        chunks.append([int(n) for n in plan.num_tokens if n > 1])
        return submit(plan)

    driver.executor.submit = recorded
    return driver, chunks


def most_partial(driver: Driver) -> int:
    """Steps to the end; the most prompts that were partial after a step."""
    most = 0
    while driver.core.has_work:
        driver.step()
        most = max(most, len(driver.core.scheduler.prefilling))
    return most


def test_no_more_prompts_are_partial_than_may_be() -> None:
    for most in (1, 2):
        driver, _ = driver_of(max_partial_prefills=most, long_prefill_threshold=20)
        driver.add(*(make_request(i, 100, max_tokens=2) for i in range(5)))
        assert most_partial(driver) == most
        assert len(driver.finished) == 5


def test_a_prompt_that_may_not_begin_says_so() -> None:
    driver, _ = driver_of(max_partial_prefills=1)
    driver.add(make_request(1, 200), make_request(2, 20))
    driver.step()
    assert driver.reason(2) == "budget: the step had no tokens left for its prompt"
    driver, _ = driver_of(max_partial_prefills=1, long_prefill_threshold=20)
    driver.add(make_request(1, 200), make_request(2, 20))
    driver.step()
    assert driver.reason(2) == "partial prefills: 1 under way (max_partial_prefills)"


def test_a_long_prompt_gets_no_more_than_the_threshold_in_a_step() -> None:
    driver, chunks = driver_of(long_prefill_threshold=20)
    driver.add(make_request(1, 70, max_tokens=1), make_request(2, 20, max_tokens=1))
    driver.run()
    assert [step for step in chunks if step] == [[20, 20], [20], [20], [10]]


def test_short_prompts_pass_long_ones_that_wait() -> None:
    driver, chunks = driver_of(long_prefill_threshold=30, max_long_partial_prefills=1)
    driver.add(make_request(1, 100, max_tokens=1), make_request(2, 100, max_tokens=1))
    driver.add(make_request(3, 30, max_tokens=1))
    driver.step()
    assert chunks[0] == [30, 30]
    assert "max_long_partial_prefills" in driver.reason(2)
    driver.run()
    assert set(driver.finished) == {1, 2, 3}


def test_the_tokens_do_not_depend_on_the_bounds() -> None:
    plain, _ = driver_of()
    bounded, _ = driver_of(
        max_partial_prefills=2, long_prefill_threshold=16, max_long_partial_prefills=1
    )
    for driver in (plain, bounded):
        driver.add(*(make_request(i, 10 + 23 * i, max_tokens=6) for i in range(6)))
        driver.run()
    assert plain.tokens == bounded.tokens


def model_of(max_slowdown: float | None, *, block_tokens: int = 16) -> PrefillBudgetModel:
    return PrefillBudgetModel(max_slowdown, max_tokens=256, block_tokens=block_tokens)


def learned(max_slowdown: float | None = 2.0) -> PrefillBudgetModel:
    """A model that has seen both kinds of step: 40 prefill tokens take as long as a step of
    decodes."""
    prefill_budget = model_of(max_slowdown)
    now = 10.0
    for _ in range(50):
        prefill_budget.observe(now, now + DECODE_S, decodes=8, prefill_tokens=0)
        prefill_budget.observe(
            now + 1, now + 1 + DECODE_S + 32 * TOKEN_S, decodes=8, prefill_tokens=32
        )
        now += 2
    prefill_budget.observe(now, now + DECODE_S, decodes=8, prefill_tokens=0)
    return prefill_budget


def test_prefill_takes_as_long_as_the_slowdown_allows() -> None:
    assert learned().allowance(8) == 32  # 40, in whole blocks
    assert learned(4.0).allowance(8) == 112


def test_without_decodes_or_without_a_bound_prefill_is_not_bounded() -> None:
    assert learned().allowance(0) == 256
    assert learned(None).allowance(8) == 256


def test_before_anything_is_measured_a_part_of_the_budget_joins() -> None:
    assert model_of(2.0).allowance(1) == 32


def test_prefill_that_is_slow_beside_decodes_still_gets_a_block() -> None:
    prefill_budget = learned()
    for at in range(100):
        prefill_budget.observe(500.0 + at, 500.9 + at, decodes=8, prefill_tokens=16)
        prefill_budget.observe(500.95 + at, 500.95 + at + DECODE_S, decodes=8, prefill_tokens=0)
    assert prefill_budget.allowance(8) == 16


def test_now_and_then_a_step_is_left_to_the_decodes() -> None:
    """Their own time would otherwise not be known any more while prefill never ends."""
    prefill_budget = learned()
    for at in range(PROBE_STEPS):
        assert prefill_budget.allowance(8) > 0
        prefill_budget.observe(500.0 + at, 500.007 + at, decodes=8, prefill_tokens=32)
    assert prefill_budget.allowance(8) == 0
    prefill_budget.observe(600.0, 600.004, decodes=8, prefill_tokens=0)
    assert prefill_budget.allowance(8) == 32


def test_a_step_held_up_by_something_else_hardly_counts() -> None:
    prefill_budget = learned()
    prefill_budget.observe(500.0, 505.0, decodes=8, prefill_tokens=0)
    assert prefill_budget.allowance(8) <= 48


def test_a_step_that_was_queued_counts_from_the_end_of_the_one_before() -> None:
    prefill_budget = model_of(2.0, block_tokens=1)
    prefill_budget.observe(0.0, 10.0, decodes=1, prefill_tokens=0)
    for at in range(200):  # submitted long before it could begin
        prefill_budget.observe(5.0, 10.0 + (at + 1) * DECODE_S, decodes=1, prefill_tokens=0)
    prefill_budget.observe(20.0, 20.0 + 10 * TOKEN_S, decodes=0, prefill_tokens=10)
    assert prefill_budget.allowance(1) == pytest.approx(DECODE_S / TOKEN_S, rel=0.25)


@pytest.mark.parametrize("max_slowdown", [None, 2.0])
def test_a_long_prompt_does_not_stall_running_streams(max_slowdown: float | None) -> None:
    driver = TimedDriver(max_step_tokens=1024, max_decode_slowdown=max_slowdown)
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
    if max_slowdown is None:
        assert longest > 20 * DECODE_S
    else:
        assert longest <= max_slowdown * DECODE_S
        assert sum(mixed) / len(mixed) >= 0.75 * DECODE_S / TOKEN_S  # and prefill gets its share


def test_few_streams_beside_prompts_that_keep_coming() -> None:
    """Defect: the time between tokens was ten times that of decodes alone with 16 users."""
    driver = TimedDriver(max_step_tokens=1024, max_running=64, max_decode_slowdown=2.0)
    driver.add(*(make_request(i, 8, max_tokens=2000) for i in range(8)))
    asked: dict[int, float] = {}
    for step in range(600):
        if step % 40 == 39:  # 100 tokens in about 40 steps: a third of what the bound lets through
            asked[100 + step] = driver.clock.now
            driver.add(make_request(100 + step, 100, max_tokens=1))
        driver.step()
    mixed = [prefill for decodes, prefill in driver.steps if decodes and prefill]
    assert max(mixed[20:]) * TOKEN_S <= DECODE_S
    assert all(id in driver.finished for id in list(asked)[:-1])
    waits = [driver.finished[id].first_token_s or 0.0 for id in list(asked)[:-1]]
    assert max(waits[3:]) <= 12 * DECODE_S


def test_prompts_alone_use_the_whole_step() -> None:
    driver = TimedDriver(max_step_tokens=1024, max_decode_slowdown=2.0)
    driver.add(make_request(1, 3000, max_tokens=1))
    driver.run()
    assert [prefill for _, prefill in driver.steps if prefill] == [1024, 1024, 952]


def test_prefill_goes_on_while_decodes_never_stop() -> None:
    """Nothing starves: each of many prompts is answered although there is always somebody who decodes."""
    driver = TimedDriver(max_step_tokens=64, max_decode_slowdown=1.1, max_running=4)
    driver.add(*(make_request(i, 200, max_tokens=50) for i in range(12)))
    for _ in itertools.takewhile(lambda _: driver.core.has_work, range(5000)):
        driver.step()
    assert len(driver.finished) == 12
