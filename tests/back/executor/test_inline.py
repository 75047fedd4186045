"""The inline executor: order, failure, close."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.back.executor.inline import InlineExecutor
from headrace.base.errors import EngineDead
from tests.back.driver import Driver, greedy_reference
from tests.back.tiny_model import TinyModel, tiny_spec

LOADER = "tests.back.tiny_model:load_tiny"


def test_overlapped_steps_run_in_order_and_feed_their_tokens_on_the_device() -> None:
    """ENG-07: tokens stay one array from the device to the core."""
    executor = InlineExecutor(tiny_spec(), loader=LOADER)
    driver = Driver(executor.facts)
    sequence = driver.add([5, 6, 7])
    pending = [executor.submit(driver.plan([(sequence, 3)]))]
    pending += [executor.submit(driver.plan([(sequence, 1)])) for _ in range(5)]
    for step in pending:
        result = step.result(10)
        assert isinstance(result.tokens, np.ndarray) and result.tokens.dtype == np.int32
        driver.read(result)
    executor.close()
    assert sequence.outputs == greedy_reference(TinyModel(), [5, 6, 7], 6)


def test_a_failed_step_fails_all_later_ones_and_the_next_submit_raises_at_once() -> None:
    """ENG-14."""
    executor = InlineExecutor(tiny_spec(config={"explode": 60}), loader=LOADER)
    driver = Driver(executor.facts)
    bad, good = driver.add([60]), driver.add([1])
    first = executor.submit(driver.plan([(bad, 1)]))
    with pytest.raises(EngineDead, match="RuntimeError"):
        first.result(10)
    with pytest.raises(EngineDead, match="step 0"):
        executor.submit(driver.plan([(good, 1)]))
    with pytest.raises(EngineDead):
        executor.check()
    executor.close()
    executor.close()


def test_close_lets_the_running_step_end_and_answers_the_queued_ones() -> None:
    executor = InlineExecutor(tiny_spec(), loader=LOADER)
    driver = Driver(executor.facts)
    sequence = driver.add([1] * 40)
    pending = [executor.submit(driver.plan([(sequence, 40)]))]
    pending += [executor.submit(driver.plan([(sequence, 1)])) for _ in range(50)]
    executor.close()
    outcomes = []
    for step in pending:
        assert step.done()
        try:
            step.result(0)
            outcomes.append("ran")
        except EngineDead as error:
            assert "closed" in error.message
            outcomes.append("closed")
    assert outcomes == sorted(outcomes, reverse=True) and outcomes[-1] == "closed"
