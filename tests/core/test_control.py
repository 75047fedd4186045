"""Pause, resume, drain and reports (ENG-15, ENG-16, 1.3)."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.wire.control import Reply
from tests.core.harness import Clock, Driver, make_request, make_spec

BOTH = pytest.mark.parametrize("overlap", [True, False])


def result_of(reply: Reply) -> object:
    assert reply.error is None, reply.error
    return msgspec.msgpack.decode(reply.result)


def busy(overlap: bool = True, **config: object) -> Driver:
    """Two running requests, one that waits for a row."""
    spec = make_spec(overlap=overlap, max_running=2, num_blocks=200, **config)
    driver = Driver(spec)
    driver.add(*(make_request(id, 10, max_tokens=20) for id in (1, 2, 3)))
    for _ in range(4):
        driver.step()
    return driver


@BOTH
def test_pause_abort_ends_everything_and_then_answers(overlap: bool) -> None:
    driver = busy(overlap)
    number = driver.call("pause", mode="abort", clear_cache=True)
    driver.run()
    assert {f.reason for f in driver.finished.values()} == {"abort"}
    assert result_of(driver.replies[number]) == {"paused": True, "mode": "abort"}
    assert driver.ask("status")["cached_blocks"] == 0
    driver.assert_at_rest()


@BOTH
def test_pause_wait_answers_after_the_last_token_of_what_ran(overlap: bool) -> None:
    driver = busy(overlap)
    number = driver.call("pause", mode="wait")
    while driver.core.has_work:
        driver.step()
        assert (number in driver.replies) == (set(driver.finished) == {1, 2})
    assert number in driver.replies
    assert driver.reason(3) == "paused: wait"
    driver.call("resume")
    driver.run()
    assert len(driver.tokens[3]) == 20


def test_pause_wait_lets_preempted_requests_finish() -> None:
    driver = Driver(make_spec(num_blocks=21, prefix_caching=False))
    driver.add(make_request(1, 30, max_tokens=40), make_request(2, 30, max_tokens=40))
    while not driver.core.scheduler.num_preemptions:
        driver.step()
    number = driver.call("pause", mode="wait")
    driver.run()
    assert set(driver.finished) == {1, 2} and number in driver.replies


@BOTH
def test_pause_keep_freezes_and_goes_on_as_if_nothing_had_been(overlap: bool) -> None:
    driver, undisturbed = busy(overlap), busy(overlap)
    undisturbed.run()
    number = driver.call("pause", mode="keep", clear_cache=True)
    driver.run()
    assert number in driver.replies and not driver.finished
    assert driver.core.num_in_flight == 0 and not driver.core.has_work
    assert driver.reason(1) == driver.reason(3) == "paused: keep"
    driver.call("resume")
    driver.run()
    assert driver.tokens == undisturbed.tokens


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_new_requests_are_held_during_a_pause(mode: str) -> None:
    """REG-018: held, not refused."""
    driver = Driver(make_spec())
    driver.call("pause", mode=mode)
    driver.add(make_request(1))
    driver.run()
    assert not driver.finished and driver.reason(1) == f"paused: {mode}"
    assert driver.ask("is_paused") == {"paused": True, "mode": mode}
    driver.call("resume")
    driver.run()
    assert driver.finished[1].reason == "length"


def test_pause_while_idle_answers_at_the_next_step() -> None:
    driver = Driver(make_spec())
    number = driver.call("pause", mode="wait")
    driver.run()
    assert number in driver.replies


def test_double_pause_and_double_resume_all_answer() -> None:
    driver = busy()
    first, second = driver.call("pause", mode="wait"), driver.call("pause", mode="keep")
    driver.run()
    assert result_of(driver.replies[first]) == result_of(driver.replies[second])
    assert driver.ask("is_paused")["mode"] == "keep"
    assert driver.ask("resume") == driver.ask("resume") == {"paused": False, "mode": None}
    driver.run()
    assert len(driver.finished) == 3


def test_resume_before_a_pause_is_complete_answers_the_pause_with_a_conflict() -> None:
    driver = busy()
    number = driver.call("pause", mode="wait")
    driver.call("resume")
    driver.run()
    error = driver.replies[number].error
    assert error is not None and error.kind == "Conflict"


@BOTH
def test_nothing_computed_before_a_reset_is_found_after_it(overlap: bool) -> None:
    """REG-019: also not the blocks of a request that ran across the reset."""
    driver = Driver(make_spec(num_blocks=200, overlap=overlap))
    prompt = make_request(1, 30).prompt_ids().tolist()
    driver.add(make_request(1, prompt, max_tokens=30))
    for _ in range(10):
        driver.step()
    driver.call("pause", mode="keep")
    driver.run()
    driver.ask("reset_prefix_cache")
    driver.call("resume")
    driver.run()
    driver.add(make_request(2, prompt, max_tokens=10))
    driver.run()
    assert driver.finished[2].num_cached == 0
    driver.add(make_request(3, [*prompt, *driver.tokens[1]]))
    driver.run()
    assert driver.finished[3].num_cached == 36, "only what the second request computed"


# drain


def test_drain_refuses_what_comes_and_finishes_what_is_there() -> None:
    """ENG-16, 1.3."""
    driver = busy()
    number = driver.call("drain", timeout_s=60.0)
    driver.add(make_request(9))
    driver.run()
    error = driver.finished[9].error
    assert error is not None and error.kind == "Unavailable" and error.retry_after_s
    assert all(driver.finished[id].reason == "length" for id in (1, 2, 3))
    assert result_of(driver.replies[number]) == {"completed": True, "aborted": 0}


def test_drain_ends_what_is_left_with_an_error_when_its_time_is_over() -> None:
    clock = Clock()
    driver = Driver(make_spec(), clock=clock)
    driver.add(make_request(1, max_tokens=100))
    driver.step()
    number = driver.call("drain", timeout_s=10.0)
    driver.step()
    assert driver.core.idle_s == 10.0
    clock.now += 10.0
    driver.run()
    error = driver.finished[1].error
    assert error is not None and error.kind == "Unavailable"
    assert result_of(driver.replies[number]) == {"completed": False, "aborted": 1}
    driver.assert_at_rest()


def test_a_drain_that_is_undone_takes_requests_again() -> None:
    """PAR-07: whoever waited for it hears of it, and fronts see both in the hello."""
    driver = busy()
    number = driver.call("drain", timeout_s=float("inf"))
    driver.step()
    assert driver.core.hello().trouble == "the engine core is draining"
    driver.call("undo_drain")
    assert driver.core.hello().trouble == ""
    driver.add(make_request(9, max_tokens=3))
    driver.run()
    assert all(driver.finished[id].reason == "length" for id in (1, 2, 3, 9))
    error = driver.replies[number].error
    assert error is not None and error.kind == "Conflict"


def test_drain_of_zero_seconds_ends_at_once() -> None:
    driver = busy()
    number = driver.call("drain", timeout_s=0.0)
    driver.run(max_steps=3)
    assert number in driver.replies and len(driver.finished) == 3


def test_drain_while_paused_ends_at_its_time() -> None:
    clock = Clock()
    driver = Driver(make_spec(), clock=clock)
    driver.call("pause", mode="keep")
    driver.add(make_request(1))
    number = driver.call("drain", timeout_s=5.0)
    driver.run()
    assert driver.core.idle_s == 5.0
    clock.now += 5.0
    driver.run()
    assert number in driver.replies and driver.finished[1].reason == "error"


# reports and bad calls


def test_explain_says_where_each_request_is() -> None:
    driver = busy()
    found = driver.ask("explain", ids=[1, 3, 99])
    assert set(found) == {"1", "3"}
    assert (found["1"]["state"], found["1"]["reason"]) == ("decode", "running: decode")
    assert (found["3"]["state"], found["3"]["position"]) == ("waiting", 0)
    assert found["1"]["num_output"] == len(driver.tokens[1])


def test_status_is_a_ledger() -> None:
    driver = busy()
    status = driver.ask("status")
    assert (status["running"], status["waiting"]) == (2, 1)
    assert (
        status["held_blocks"]
        == status["refcount_sum"]
        == status["total_blocks"] - status["free_blocks"]
    )
    driver.run()
    driver.assert_at_rest()
    metrics = driver.ask("metrics")
    assert metrics["finished"] == {"length": 3} and metrics["output_tokens"] == 60


@pytest.mark.parametrize(
    ("operation", "arguments", "field"),
    [
        ("dance", {}, "operation"),
        ("pause", {"mode": "stop"}, "mode"),
        ("pause", {"mode": "wait", "clear_cache": 1}, "clear_cache"),
        ("drain", {"timeout_s": -1}, "timeout_s"),
        ("drain", {"timeout_s": float("nan")}, "timeout_s"),
        ("drain", {"timeout_s": "soon"}, "timeout_s"),
        ("explain", {"ids": 3}, "ids"),
    ],
)
def test_a_bad_call_is_answered_with_its_field_and_changes_nothing(
    operation: str, arguments: dict[str, object], field: str
) -> None:
    driver = Driver(make_spec())
    reply = driver.replies[driver.call(operation, **arguments)]
    assert reply.error is not None and reply.error.kind == "InvalidRequest"
    assert reply.error.field == field
    assert driver.ask("is_paused")["paused"] is False
    assert driver.ask("status")["draining"] is False


@pytest.mark.parametrize("public_id", ["chatcmpl-a", "my-own-id"])
def test_explain_finds_a_waiting_request_by_its_public_ids(public_id: str) -> None:
    """Defect: the client's own id got 404 while its request waited."""
    driver = busy()
    driver.add(make_request(7, label="chatcmpl-a", external_id="my-own-id", tenant="t"))
    (one,) = driver.ask("explain", labels=[public_id]).values()
    assert (one["label"], one["external_id"]) == ("chatcmpl-a", "my-own-id")
    assert one["reason"].startswith("rows: ")
    assert driver.ask("explain", labels=[public_id], tenant="another") == {}
    driver.run()
    assert driver.ask("explain", labels=[public_id]) == {}


def test_a_label_stands_for_all_prompts_of_a_request() -> None:
    driver = busy()
    for id, label in ((7, "cmpl-a"), (8, "cmpl-a-1"), (9, "cmpl-a-2"), (10, "cmpl-ab")):
        driver.add(make_request(id, label=label))
    assert set(driver.ask("explain", labels=["cmpl-a"])) == {"7", "8", "9"}
    assert set(driver.ask("explain", labels=["cmpl-a-1"])) == {"8"}
    assert driver.ask("abort", labels=["cmpl-a"]) == {"aborted": 3}


def test_a_pause_that_failed_elsewhere_is_undone_here() -> None:
    """Defect: a pause that fails on one of several replicas left the others frozen."""
    driver, undisturbed = busy(), busy()
    undisturbed.run()
    driver.call("pause", mode="keep", token="a")
    driver.run()
    assert driver.ask("undo_pause", token="another") == {"paused": True, "mode": "keep"}
    assert driver.ask("undo_pause", token="a") == {"paused": False, "mode": None}
    assert driver.ask("undo_pause", token="a") == {"paused": False, "mode": None}
    driver.run()
    assert driver.tokens == undisturbed.tokens


def test_undoing_a_pause_goes_back_to_the_pause_before_it() -> None:
    driver = busy()
    driver.call("pause", mode="keep")
    driver.run()
    waiting = driver.call("pause", mode="wait", token="b")
    assert driver.ask("undo_pause", token="b") == {"paused": True, "mode": "keep"}
    driver.step()
    error = driver.replies[waiting].error
    assert error is not None and error.kind == "Conflict"
    driver.call("resume")
    driver.run()
    assert len(driver.finished) == 3


def test_resuming_leaves_nothing_to_undo() -> None:
    driver = busy()
    driver.call("pause", mode="keep", token="a")
    driver.call("resume")
    driver.call("pause", mode="keep")
    assert driver.ask("undo_pause", token="a")["paused"] is True


def test_a_request_that_times_out_in_the_queue_says_what_it_waited_for() -> None:
    """Defect: a 504 said "waiting: new"."""
    clock = Clock()
    driver = Driver(make_spec(max_running=1), clock=clock)
    driver.add(make_request(1, max_tokens=100))
    driver.step()
    driver.add(make_request(2, deadline_s=5.0))
    driver.step()
    clock.now += 5.0
    driver.step()
    error = driver.finished[2].error
    assert error is not None and "(waiting: rows: all 1 are taken (max_running))" in error.message
