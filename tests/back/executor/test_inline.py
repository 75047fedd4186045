"""The inline executor: order, failure, close."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.executor.inline import InlineExecutor, StepThreads
from headrace.back.kernels.native.library import load
from headrace.base.errors import ConfigError, EngineDead
from headrace.base.wire.step import StepPlan, WorkerFacts
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
        result = step.result(300)
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
        first.result(300)
    with pytest.raises(EngineDead, match="step 0"):
        executor.submit(driver.plan([(good, 1)]))
    with pytest.raises(EngineDead):
        executor.check()
    executor.close()
    executor.close()


def test_parked_it_gives_its_cache_back_and_goes_on_with_the_same_weights() -> None:
    """ENG-18, level 1: nothing is loaded again, and nothing that knew an address is used again."""
    executor = InlineExecutor(tiny_spec(), loader=LOADER)
    model = executor._resident._loaded.model
    for _ in range(2):
        driver = Driver(executor.facts)
        sequence = driver.add([5, 6, 7])
        driver.read(executor.submit(driver.plan([(sequence, 3)])).result(300))
        for _ in range(4):
            driver.read(executor.submit(driver.plan([(sequence, 1)])).result(300))
        assert sequence.outputs == greedy_reference(TinyModel(), [5, 6, 7], 5)
        cache = weakref.ref(executor._resident.runner._kv)
        executor.park()
        assert cache() is None
        executor.unpark()
        assert executor._resident._loaded.model is model
    executor.close()


@pytest.mark.parametrize("parked", [False, True])
def test_closed_it_holds_no_weights(parked: bool) -> None:
    """BEY-27: whoever still knows the executor keeps no memory with it."""
    executor = InlineExecutor(tiny_spec(), loader=LOADER)
    model = weakref.ref(executor._resident._loaded.model)
    if parked:
        executor.park()
    executor.close()
    gc.collect()
    assert model() is None


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


def facts(**decisions: str) -> WorkerFacts:
    return WorkerFacts(
        num_blocks=2,
        block_tokens=16,
        groups=(),
        logits_width=100_000,
        max_rows=64,
        max_model_len=16,
        decisions=[(f"kernel.{op}", "auto", kernel, "") for op, kernel in decisions.items()],
    )


def plan_of(rows: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    fields: dict[str, Any] = dict.fromkeys(StepPlan.__struct_fields__, none)
    sample = np.ones(rows, np.bool_)
    return StepPlan(**{**fields, "step": 1, "starts": [], "hook_payloads": {}, "sample": sample})


@pytest.mark.parametrize(
    "decisions, small, large",
    [
        ({"linear": "native", "rope": "torch"}, 1, 2),
        ({"linear": "torch"}, 2, 2),
        ({"linear": "native", "linear_quant": "torch"}, 2, 2),
        ({}, 2, 2),
    ],
)
def test_torch_gets_threads_where_its_ops_are_large_or_the_products_are_its_own(
    decisions: dict[str, str], small: int, large: int
) -> None:
    before = torch.get_num_threads()
    try:
        threads = StepThreads(2, facts(**decisions))
        threads.fit(plan_of(1))
        assert torch.get_num_threads() == small
        threads.fit(plan_of(64))
        assert torch.get_num_threads() == large
    finally:
        torch.set_num_threads(before)


def test_what_is_wrong_with_its_threads_kernels_is_said_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken thread pool's traceback stood in place of the variable and its values."""
    monkeypatch.setenv("HEADRACE_ISA", "mmx")
    load.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"HEADRACE_ISA=mmx.* must be one of portable"):
            InlineExecutor(tiny_spec(), loader=LOADER)
    finally:
        load.cache_clear()
