"""EngineCore: every request ends exactly once, with the tokens it would have alone."""

from __future__ import annotations

import gc
import time
import weakref

import msgspec
import numpy as np
import pytest

from headrace.back.executor.null import NullBehaviour
from headrace.base.errors import EngineDead, from_wire
from headrace.base.wire.request import RowSampling
from headrace.core.core import FAILING_STEPS
from headrace.core.service_state import PauseMode
from tests.core.harness import EOS, Clock, Driver, make_request, make_spec, window_groups
from tests.core.scheduler.test_scheduler import Shut

BOTH = pytest.mark.parametrize("overlap", [True, False])


def tokens_of(id: int, prompt: int = 8, max_tokens: int = 40) -> list[int]:
    """What a request samples if nothing stops it."""
    driver = Driver(make_spec(overlap=False))
    driver.add(make_request(id, prompt, max_tokens=max_tokens))
    driver.run()
    return driver.tokens[id]


def test_hello_says_what_fits() -> None:
    hello = Driver(make_spec(num_blocks=21, block_tokens=4, max_model_len=256)).core.hello()
    assert (hello.capacity_tokens, hello.max_model_len, hello.num_blocks) == (80, 256, 21)


# stops


@BOTH
def test_a_stop_id_ends_the_request_and_is_the_last_token(overlap: bool) -> None:
    plain = tokens_of(1)
    driver = Driver(make_spec(overlap=overlap))
    driver.add(make_request(1, max_tokens=40, stop_ids=(plain[6],)))
    driver.run()
    assert driver.tokens[1] == plain[:7]
    assert (driver.finished[1].reason, driver.finished[1].stop_id) == ("stop", plain[6])
    driver.assert_at_rest()


def test_more_stop_ids_than_columns_work_alike() -> None:
    plain = tokens_of(1)
    driver = Driver(make_spec())
    spare = tuple(id for id in range(500, 540) if id not in plain[:6])
    driver.add(make_request(1, max_tokens=40, stop_ids=(*spare, plain[6])))
    driver.run()
    assert driver.tokens[1] == plain[:7] and driver.finished[1].stop_id == plain[6]


@BOTH
def test_stop_ids_count_only_from_min_tokens_on(overlap: bool) -> None:
    plain = tokens_of(1)
    for min_tokens, length in ((6, 7), (7, 40)):
        driver = Driver(make_spec(overlap=overlap))
        driver.add(make_request(1, max_tokens=40, min_tokens=min_tokens, stop_ids=(plain[6],)))
        driver.run()
        assert driver.tokens[1] == plain[:length]


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact_and_wastes_no_row(overlap: bool, max_tokens: int) -> None:
    driver = Driver(make_spec(overlap=overlap))
    driver.add(make_request(1, 8, max_tokens=max_tokens))
    driver.run()
    assert len(driver.tokens[1]) == max_tokens
    assert driver.core.counters.rows == max_tokens


def test_a_late_stop_wastes_one_row() -> None:
    plain = tokens_of(1)
    driver = Driver(make_spec(overlap=True))
    driver.add(make_request(1, max_tokens=40, stop_ids=(plain[6],)))
    driver.run()
    assert driver.core.counters.rows == 7 + 1


@BOTH
def test_max_tokens_0_scores_the_prompt_and_ends(overlap: bool) -> None:
    driver = Driver(make_spec(overlap=overlap, max_step_tokens=7))
    scoring = RowSampling(temperature=0.0, prompt_logprobs=1)
    driver.add(make_request(1, 20, max_tokens=0, sampling=scoring))
    driver.run()
    assert driver.finished[1].reason == "length" and driver.tokens[1] == []
    assert driver.prompt_scores[1] == list(range(1, 20))
    driver.assert_at_rest()


def test_the_context_bounds_the_answer() -> None:
    driver = Driver(make_spec(max_model_len=32, num_blocks=64))
    driver.add(make_request(1, 20, max_tokens=100))
    driver.run()
    assert len(driver.tokens[1]) == 12 and driver.finished[1].reason == "length"


# overlap


def test_with_overlap_one_step_is_in_flight_between_calls() -> None:
    for overlap, depth in ((True, 1), (False, 0)):
        driver = Driver(make_spec(overlap=overlap))
        driver.add(make_request(1, max_tokens=10))
        driver.step()
        driver.step()
        assert driver.core.num_in_flight == depth


def test_step_without_wait_returns_while_the_device_works() -> None:
    driver = Driver(make_spec(), behaviour=NullBehaviour(hangs_at=1))
    driver.add(make_request(1))
    assert driver.core.step(wait=False).tokens is None
    assert driver.core.step(wait=False).tokens is None
    assert driver.core.num_in_flight == 2
    assert driver.core.step(wait=False).tokens is None


# prefix cache


def test_a_prefix_hit_gives_the_same_tokens_and_is_reported() -> None:
    driver = Driver(make_spec(num_blocks=200))
    driver.add(make_request(1, 40, max_tokens=20))
    driver.run()
    twin = make_request(1, 40).prompt_ids().tolist()
    driver.add(make_request(2, twin, max_tokens=20))
    driver.run()
    assert driver.tokens[1] == driver.tokens[2]
    assert driver.finished[2].num_cached == 36, "one token of the prompt is left to compute"


def test_outputs_are_found_again_by_the_next_turn() -> None:
    driver = Driver(make_spec(num_blocks=200))
    driver.add(make_request(1, 10, max_tokens=23))
    driver.run()
    turn = [*make_request(1, 10).prompt_ids().tolist(), *driver.tokens[1], 5, 6, 7]
    driver.add(make_request(2, turn))
    driver.run()
    assert driver.finished[2].num_cached == 32


@pytest.mark.parametrize("prompt", [31, 32, 33, 40, 41])
def test_two_turns_on_a_window_model_hit(prompt: int) -> None:
    """REG-013, REG-012: also for the very same prompt again, where only num_tokens - 1 may match."""
    driver = Driver(make_spec(num_blocks=200), groups=window_groups(9))
    driver.add(make_request(1, prompt, max_tokens=30))
    driver.run()
    first = make_request(1, prompt).prompt_ids().tolist()
    driver.add(make_request(2, first, max_tokens=30))
    driver.run()
    assert driver.finished[2].num_cached == (prompt - 1) // 4 * 4
    assert driver.tokens[2] == driver.tokens[1]
    driver.add(make_request(3, [*first, *driver.tokens[1], 5, 6]))
    driver.run()
    assert driver.finished[3].num_cached == (prompt + 29) // 4 * 4


def test_window_blocks_outside_the_window_are_free_and_carry_no_hash() -> None:
    """ENG-08, REG-012: what has left the window while decoding is plain again."""
    driver = Driver(make_spec(num_blocks=200), groups=window_groups(9))
    driver.add(make_request(1, 8, max_tokens=100))
    while len(driver.tokens[1]) < 80:
        driver.step()
    request, pool = driver.core.requests[1], driver.core.kv.pool
    windowed = request.blocks[1]
    assert sum(block != 0 for block in windowed) <= driver.core.kv.kinds[1].most_held(
        400, done=0, chunk_tokens=4
    )
    assert all(block == 0 for block in windowed[: request.trimmed[1]])
    named = [block for block, (group, _) in pool._tags.items() if group == 1]
    assert set(named) <= {block for block in windowed if block} | {
        b for b in named if pool.refs(1, b) == 0
    }
    prompt_blocks = 2
    assert len([b for b in named if pool.refs(1, b) == 0]) <= prompt_blocks


def test_tenants_and_salts_share_nothing() -> None:
    """P16, REG-112."""
    prompt = make_request(1, 40).prompt_ids().tolist()
    driver = Driver(make_spec(num_blocks=400))
    driver.add(make_request(1, prompt, tenant="a", cache_salt="s"))
    driver.run()
    driver.add(
        make_request(2, prompt, tenant="b", cache_salt="s"),
        make_request(3, prompt, tenant="a", cache_salt="t"),
        make_request(4, prompt, tenant="a", cache_salt="s", extra_keys=(b"adapter",)),
    )
    driver.run()
    assert [driver.finished[id].num_cached for id in (2, 3, 4)] == [0, 0, 0]
    driver.add(make_request(5, prompt, tenant="a", cache_salt="s"))
    driver.run()
    assert driver.finished[5].num_cached == 36


def test_prompt_logprobs_take_no_prefix_hit() -> None:
    prompt = make_request(1, 40).prompt_ids().tolist()
    driver = Driver(make_spec(num_blocks=400))
    driver.add(make_request(1, prompt))
    driver.run()
    scoring = RowSampling(temperature=0.0, prompt_logprobs=0)
    driver.add(make_request(2, prompt, sampling=scoring))
    driver.run()
    assert driver.finished[2].num_cached == 0
    assert driver.prompt_scores[2] == list(range(1, 40))


def test_logprobs_come_with_their_tokens() -> None:
    driver = Driver(make_spec())
    driver.add(make_request(1), make_request(2, sampling=RowSampling(temperature=0.0, logprobs=3)))
    driver.run()
    assert driver.logprobs[1] == [None] * 8
    for token, scores in zip(driver.tokens[2], driver.logprobs[2], strict=True):
        assert scores is not None and scores.ids[0] == token and len(scores.ids) == 4


# failures stay inside


@BOTH
def test_a_failed_row_ends_alone_and_poisons_nothing(overlap: bool) -> None:
    """P7, 1.15: the failed request's blocks are not found again."""
    behaviour = NullBehaviour(fails=lambda request, position: request == 1 and position == 45)
    driver = Driver(make_spec(num_blocks=200, overlap=overlap), behaviour=behaviour)
    prompt = make_request(1, 40).prompt_ids().tolist()
    driver.add(make_request(1, prompt, max_tokens=20), make_request(2, 12, max_tokens=30))
    driver.run()
    error = driver.finished[1].error
    assert error is not None and error.kind == "NonFiniteLogits"
    assert len(driver.tokens[1]) == 5
    assert driver.tokens[2] == tokens_of(2, 12, 30)
    driver.add(make_request(3, prompt))
    driver.run()
    assert driver.finished[3].num_cached == 0
    driver.assert_at_rest()


def test_a_dead_worker_ends_everything_with_an_explicit_error() -> None:
    """ENG-14, REG-017: the failure surfaces in step; fail_all answers everybody."""
    driver = Driver(make_spec(), behaviour=NullBehaviour(dies_at=3))
    driver.add(*(make_request(id) for id in range(1, 20)))
    with pytest.raises(EngineDead) as dead:
        for _ in range(10):
            driver.step()
    output = driver.core.fail_all(dead.value)
    assert output.tokens is not None
    assert {f.id for f in output.tokens.finished} == set(range(1, 20))
    assert all(
        isinstance(from_wire(f.error), EngineDead) for f in output.tokens.finished if f.error
    )
    driver.assert_at_rest()


def test_a_step_that_hangs_is_an_error() -> None:
    """1.6."""
    driver = Driver(make_spec(step_timeout_s=0.0), behaviour=NullBehaviour(hangs_at=1))
    driver.add(make_request(1))
    with pytest.raises(EngineDead, match=r"longer than 0\.0 s"):
        driver.run()


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    driver = Driver(make_spec())
    driver.add(make_request(1, max_tokens=5))
    driver.core.add(make_request(1, max_tokens=7))
    output = driver.core.output_buffer.take()
    assert output.tokens is not None and output.tokens.finished[0].reason == "error"
    driver.run()
    assert len(driver.tokens[1]) == 5


# what is told with the first token


@BOTH
def test_what_was_cached_is_told_once_with_the_first_token(overlap: bool) -> None:
    driver = Driver(make_spec(overlap=overlap))
    prompt = list(range(100, 112))
    for number in (1, 2):
        driver.add(make_request(number, prompt, max_tokens=3))
        while not driver.tokens[number]:
            assert len(driver.cached) == number - 1
            driver.step()
        assert len(driver.cached) == number
        driver.run()
    assert driver.cached == [(1, 0), (2, driver.finished[2].num_cached)]
    assert driver.finished[2].num_cached > 0


# aborts


@BOTH
@pytest.mark.parametrize("after", range(8))
def test_abort_at_any_moment_frees_everything_and_touches_nobody(overlap: bool, after: int) -> None:
    """1.1: waiting, in every chunk of the prefill, decoding, just finished."""
    driver = Driver(make_spec(overlap=overlap, max_step_tokens=9))
    driver.add(make_request(1, 30, max_tokens=20), make_request(2, 10, max_tokens=20))
    for _ in range(after):
        driver.step()
    driver.core.abort([1, 1, 77])
    before = len(driver.tokens[1])
    driver.run()
    assert driver.finished[1].reason == "abort" and len(driver.tokens[1]) == before
    assert driver.tokens[2] == tokens_of(2, 10, 20)
    driver.core.abort([1, 2])
    driver.run()
    driver.assert_at_rest()


def test_an_id_may_be_used_again_at_once_after_an_abort() -> None:
    driver = Driver(make_spec())
    driver.add(make_request(1, max_tokens=30))
    driver.step()
    driver.step()
    driver.core.abort([1])
    driver.core.add(make_request(1, 12, max_tokens=6))
    driver.step()
    assert driver.finished.pop(1).reason == "abort"
    driver.tokens.clear()
    driver.run()
    assert driver.tokens[1] == tokens_of(1, 12, 6)


# deadlines


def test_a_queued_request_whose_deadline_passes_never_runs() -> None:
    """1.7."""
    clock = Clock()
    driver = Driver(make_spec(max_running=1), clock=clock)
    driver.add(make_request(1, max_tokens=50))
    driver.step()
    driver.add(make_request(2, deadline_s=5.0))
    assert driver.core.idle_s == 5.0
    clock.now += 5.0
    driver.run()
    error = driver.finished[2].error
    assert error is not None and error.kind == "DeadlineExceeded"
    assert driver.finished[2].scheduled_s is None and driver.tokens[2] == []
    assert len(driver.tokens[1]) == 50


def test_a_running_request_ends_at_its_deadline() -> None:
    clock = Clock()
    driver = Driver(make_spec(), clock=clock)
    driver.add(make_request(1, max_tokens=50, deadline_s=1.0))
    driver.step()
    driver.step()
    clock.now += 1.0
    driver.run()
    error = driver.finished[1].error
    assert error is not None and error.kind == "DeadlineExceeded" and driver.tokens[1]
    driver.assert_at_rest()


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    driver = Driver(make_spec(), check=False)
    for id in range(1, 1500):
        driver.add(make_request(id, 2, max_tokens=1, deadline_s=3600.0))
        driver.run()
    assert len(driver.core._deadlines) < 1100


# memory


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_500_finished_requests_are_dead_with_gc_off(overlap: bool) -> None:
    """ENG-13, REG-016: reference counts alone free a request, on every path out."""
    driver = Driver(make_spec(num_blocks=40, overlap=overlap), check=False)
    references = []
    gc.disable()
    try:
        for id in range(500):
            clockwise = {"deadline_s": 0.0} if id % 7 == 0 else {}
            driver.add(make_request(id, 20, max_tokens=20, **clockwise))
            if id in driver.core.requests:
                references.append(weakref.ref(driver.core.requests[id]))
            if id % 5 == 0:
                driver.core.abort([id])
            driver.step()
        driver.run()
        assert len(references) == 500
        assert not [reference for reference in references if reference() is not None]
    finally:
        gc.enable()


def test_steps_in_which_every_row_fails_are_reported_until_one_succeeds() -> None:
    """Defect: a batch of nothing but NaN did not lower health."""
    behaviour = NullBehaviour(fails=lambda request, position: request < 10)
    driver = Driver(make_spec(), behaviour=behaviour)
    for id in range(1, 1 + FAILING_STEPS):
        assert driver.core.hello().failing == ""
        driver.add(make_request(id))
        driver.run()
    assert "failed for all of their requests" in driver.core.hello().failing
    assert driver.ask("status")["failed_steps"] == FAILING_STEPS
    driver.add(make_request(10))
    driver.run()
    assert driver.core.hello().failing == ""


def test_a_failed_row_beside_a_good_one_is_no_failing_engine() -> None:
    behaviour = NullBehaviour(fails=lambda request, position: request < 10)
    driver = Driver(make_spec(), behaviour=behaviour)
    driver.add(make_request(10, max_tokens=50))
    driver.step()
    for id in range(1, 2 + FAILING_STEPS):
        driver.add(make_request(id))
        driver.step()
        driver.step()
    assert driver.core.hello().failing == ""
    assert driver.ask("status")["failed_steps"] == 0


def test_a_failed_step_keeps_no_request_alive() -> None:
    driver = Driver(make_spec(), behaviour=NullBehaviour(eos_rate=0.2))
    driver.add(make_request(1, max_tokens=50, stop_ids=(EOS,)))
    reference = weakref.ref(driver.core.requests[1])
    driver.run()
    assert reference() is None


# cost


def test_the_host_cost_does_not_grow_with_the_context() -> None:
    """ENG-06: a step at 16 rows costs the same after 64 and after 8192 tokens (least of many)."""
    least = {}
    for context in (64, 8192):
        spec = make_spec(
            num_blocks=16 * 540 + 1,
            block_tokens=16,
            max_model_len=9000,
            max_running=16,
            max_step_tokens=16 * 8192,
        )
        driver = Driver(spec, check=False, clock=time.monotonic)
        prompts = [np.full(context, 3 + id) for id in range(16)]
        driver.add(*(make_request(id, p.tolist(), max_tokens=300) for id, p in enumerate(prompts)))
        driver.step()
        times = []
        for _ in range(200):
            before = driver.core.counters.plan_s + driver.core.counters.update_s
            driver.core.step(wait=True)
            times.append(driver.core.counters.plan_s + driver.core.counters.update_s - before)
        least[context] = min(times)
    assert least[8192] < 2 * least[64] + 20e-6


def test_a_step_is_slow_by_what_was_measured_or_as_configured() -> None:
    clock = Clock()
    driver = Driver(make_spec(), clock=clock)
    assert driver.core.slow_step_s == 10.0, "nothing is measured, nothing in flight"
    driver.add(make_request(1, max_tokens=50))
    for _ in range(20):
        clock.now += 2.0
        driver.step()
    assert driver.core.num_in_flight == 1
    assert driver.core.slow_step_s == pytest.approx(40.0, rel=0.2), "20 times a step of 2 s"
    assert Driver(make_spec(slow_step_s=3.0)).core.slow_step_s == 3.0


# who waits is told


def test_requests_that_the_plan_leaves_waiting_are_told_of_once() -> None:
    driver = Driver(make_spec(max_running=1))
    for id in (1, 2, 3):
        driver.add(make_request(id, max_tokens=3))
    assert driver.queued == []
    driver.step()
    assert driver.queued == [2, 3]
    driver.run()
    assert driver.queued == [2, 3] and driver.finished.keys() == {1, 2, 3}


def test_requests_that_a_pause_holds_back_are_told_of() -> None:
    driver = Driver(make_spec())
    driver.core.service.pause = PauseMode.KEEP
    driver.add(make_request(1, max_tokens=3))
    assert driver.core.has_work
    driver.step()
    assert driver.queued == [1] and not driver.core.has_work


def test_a_request_that_a_hook_may_still_refuse_is_not_told_of() -> None:
    driver = Driver(make_spec(max_running=1), hooks=[Shut()])
    driver.add(make_request(1, max_tokens=3))
    driver.add(make_request(2, max_tokens=3, hook_payloads={Shut.name: msgspec.Raw(b"\xc0")}))
    driver.step()
    assert driver.queued == []
