"""Nothing runs although requests wait: who is told what, and how it goes on."""

from __future__ import annotations

import logging

import pytest

from headrace.core.ports import AdmissionHook, AdmissionVerdict
from headrace.core.stall import PATIENCE_S, stall_of
from tests.core.harness import Clock, Driver, make_request, make_spec


def test_a_stall_names_each_resource_and_its_requests() -> None:
    """BEY-13, BEY-53: a pure function of the scheduler's reasons."""
    reasons = [(f"r{i}", "KV blocks: needs 75, free 20") for i in range(5)]
    stall = stall_of([*reasons, ("x", "rows: all 8 are taken"), ("y", "new")], others=("load",))
    assert stall is not None and stall.is_lost
    assert stall.resources == ("KV blocks", "rows", "new")
    assert stall.text == (
        "nothing runs and nothing can begin, because requests wait for "
        "KV blocks: needs 75, free 20 (r0, r1, r2 and 2 more); "
        "rows: all 8 are taken (x); new: no reason was noted (y)"
    )


def test_a_wait_for_somebody_else_is_no_fault_of_the_engine() -> None:
    stall = stall_of([("a", "load: reads"), ("b", "KV blocks: 0 free")], others=("load",))
    assert stall is not None and not stall.is_lost
    assert stall_of([], others=()) is None


def test_a_request_without_a_block_waits_and_the_loop_goes_on() -> None:
    """REG-008: no request runs, and a copy of KV holds every block: this was an assertion."""
    driver = Driver(make_spec(num_blocks=21, block_tokens=4), clock=Clock())
    [held] = driver.core.kv.pool.take([20])
    driver.add(make_request(1, 8, max_tokens=2))
    driver.step()
    assert driver.reason(1) == "KV blocks: 0 free, though none runs"
    driver.core.kv.pool.release(0, held)
    driver.call("is_paused")
    driver.run()
    assert driver.finished[1].reason == "length"
    driver.assert_at_rest()


def test_a_deadlock_is_told_fails_health_and_ends_what_cannot_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """BEY-13, BEY-53: the reason names resource and requests; those behind go on."""
    clock = Clock()
    driver = Driver(make_spec(num_blocks=21, block_tokens=4), clock=clock)
    [held] = driver.core.kv.pool.take([20])
    driver.add(make_request(1, 60, label="first"), make_request(2, 5, label="second", max_tokens=2))
    driver.run()
    assert driver.core.idle_s == pytest.approx(PATIENCE_S) and not driver.finished
    assert driver.core.hello().stalled == driver.core.hello().failing == ""
    clock.now += PATIENCE_S
    with caplog.at_level(logging.ERROR, "headrace.core.stall"):
        driver.step()
    assert "because requests wait for KV blocks: 0 free" in caplog.text
    ended = driver.finished[1]
    assert ended.error is not None and "(first, second)" in ended.error.message
    hello, status = driver.core.hello(), driver.ask("status")
    assert hello.failing == hello.stalled != "" and status["stalls"] == 1
    driver.core.kv.pool.release(0, held)
    driver.run()
    assert driver.finished[2].reason == "length" and driver.core.hello().failing == ""
    driver.assert_at_rest()


class Shut(AdmissionHook):
    """Holds everything back."""

    name = "gate"

    def admit(self, request: object) -> AdmissionVerdict:
        return AdmissionVerdict("yes")

    def ready(self, request_id: int, computed: object = None) -> AdmissionVerdict:
        return AdmissionVerdict("not_now", "the gate is shut")

    def payload(self, request_ids: list[int]) -> bytes | None:
        return None

    def finish(self, request_id: int) -> None:
        pass


def test_a_wait_for_a_hook_is_told_and_ends_nobody() -> None:
    clock = Clock()
    driver = Driver(make_spec(), hooks=[Shut()], clock=clock)
    driver.add(make_request(1, 8, label="first"))
    driver.run()
    clock.now += PATIENCE_S
    driver.step()
    hello = driver.core.hello()
    assert "gate: the gate is shut (first)" in hello.stalled and not hello.failing
    clock.now += PATIENCE_S
    driver.step()
    status = driver.ask("status")
    assert status["stalled_s"] == 2 * PATIENCE_S and status["stalls"] == 1 and not driver.finished
    driver.core.abort([1])
    assert driver.core.hello().stalled == ""
