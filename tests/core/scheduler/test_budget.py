"""Bounds on prompts that are computed in part, and on the chunks of long ones (ENG-11)."""

from __future__ import annotations

from headrace.base.wire.step import StepPlan
from tests.core.harness import Driver, make_request, make_spec


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
