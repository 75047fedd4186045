"""What runs, what waits and why: on whole cores with the checking null executor."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from headrace.base.config.resolved import SchedulerSpec
from headrace.base.wire.request import EngineRequest
from headrace.core.adapters import BASE, LoadedAdapter
from headrace.core.ports import AdmissionHook, AdmissionVerdict
from headrace.core.request import Request, RequestState
from headrace.core.scheduler.orders import order_of
from headrace.core.stall import POLL_S as HOOK_POLL_S
from tests.core.harness import FULL, Clock, Driver, make_request, make_spec, window_groups


def first_token_steps(driver: Driver, ids: list[int], max_steps: int = 1000) -> dict[int, int]:
    """The number of the step that brought each request's first token."""
    found: dict[int, int] = {}
    while len(found) < len(ids):
        assert driver.num_steps < max_steps
        driver.step()
        for id in ids:
            if driver.tokens[id] and id not in found:
                found[id] = driver.num_steps
    return found


def started(driver: Driver) -> set[int]:
    return {r.id for r in driver.core.requests if r.scheduled_at is not None}


# ENG-01


def burst(inter_prefill_budget: int | None, **config: object) -> Driver:
    """16 prompts of 1024 tokens at once, 4096 tokens a step."""
    spec = make_spec(
        num_blocks=1200,
        block_tokens=16,
        max_model_len=2048,
        max_running=16,
        max_step_tokens=4096,
        overlap=False,
        inter_prefill_budget=inter_prefill_budget,
        **config,
    )
    driver = Driver(spec, check=False)
    driver.add(*(make_request(id, 1024, max_tokens=2) for id in range(16)))
    return driver


def test_inter_prefill_budget_lets_one_prompt_in_per_step() -> None:
    """ENG-01: the first prompts answer first, the last is hardly later."""
    steps = first_token_steps(burst(1024), list(range(16)))
    assert list(steps.values()) == list(range(1, 17))


def test_without_inter_prefill_budget_prompts_are_packed() -> None:
    steps = first_token_steps(burst(None), list(range(16)))
    assert list(steps.values()) == sorted(steps.values())
    assert Counter(steps.values())[1] == 4 and max(steps.values()) == 5


@pytest.mark.parametrize("budget", [1, 100, 1023])
def test_inter_prefill_budget_below_one_prompt_still_makes_progress(budget: int) -> None:
    steps = first_token_steps(burst(budget), list(range(16)))
    assert list(steps.values()) == sorted(steps.values()) and max(steps.values()) == 16


def test_inter_prefill_budget_counts_only_tokens_that_are_computed() -> None:
    driver = burst(1024)
    driver.run()
    driver.add(*(make_request(100 + id, _prompt_of(id), max_tokens=2) for id in range(16)))
    before = driver.num_steps
    first_token_steps(driver, [100 + id for id in range(16)])
    assert driver.num_steps == before + 1, "16 cached prompts of 16 new tokens fit one step"


def _prompt_of(id: int) -> list[int]:
    return make_request(id, 1024).prompt_ids().tolist()


# ENG-02, ENG-03


def crowd(**config: object) -> Driver:
    """Two rows hold all but 50 of the blocks; their requests run on for long."""
    spec = make_spec(
        num_blocks=151,
        block_tokens=4,
        max_model_len=600,
        max_step_tokens=1000,
        prefix_caching=False,
        **config,
    )
    driver = Driver(spec)
    driver.add(make_request(1, 200, max_tokens=30), make_request(2, 200, max_tokens=30))
    driver.step()
    return driver


def test_light_requests_pass_a_heavy_one_that_lacks_blocks() -> None:
    """ENG-02, REG-001."""
    driver = crowd()
    driver.add(make_request(3, 300, max_tokens=1), make_request(4, 40), make_request(5, 40))
    driver.step()
    assert started(driver) == {1, 2, 4, 5}
    assert driver.reason(3).startswith("KV blocks: needs 75, free ")
    driver.run()
    assert driver.finished[3].reason == "length"


@pytest.mark.parametrize(("ageing_steps", "served"), [(20, True), (10_000, False)])
def test_a_heavy_request_is_not_passed_over_for_ever(ageing_steps: int, served: bool) -> None:
    """REG-001: lights keep coming; after ageing_steps the freed blocks are kept for the heavy one."""
    driver = crowd(ageing_steps=ageing_steps, max_running=16)
    driver.add(make_request(3, 560, max_tokens=1))
    for id in range(10, 150):
        driver.add(make_request(id, 40, max_tokens=10 + id * 5 % 17))
        driver.step()
    assert (3 in driver.finished) == served
    driver.run()
    assert all(finished.reason == "length" for finished in driver.finished.values())


def test_what_is_skipped_keeps_its_place() -> None:
    """ENG-03, REG-003: whatever subset is skipped, the queue stays in the order of arrival."""
    driver = crowd()
    driver.add(*(make_request(id, 300 if id % 3 else 20, max_tokens=3) for id in range(10, 40)))
    while driver.core.has_work:
        driver.step()
        queue = [request.arrival for request in driver.core.scheduler.queue]
        assert queue == sorted(queue)
    starts = {id: f.scheduled_s for id, f in driver.finished.items()}
    assert None not in starts.values()


def test_equals_start_in_the_order_of_arrival() -> None:
    driver = Driver(make_spec(max_running=2))
    driver.add(*(make_request(id, 8, max_tokens=4) for id in (5, 3, 9, 1)))
    assert list(first_token_steps(driver, [5, 3, 9, 1])) == [5, 3, 9, 1]


class Shut(AdmissionHook):
    """A hook that keeps chosen requests back until it is opened, such as a KV load that has not arrived."""

    name = "load"

    def __init__(self, *ids: int) -> None:
        self.shut = set(ids)

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        return AdmissionVerdict("yes")

    def ready(self, request_id: int, computed: object) -> AdmissionVerdict:
        return (
            AdmissionVerdict("not_now", "loading")
            if request_id in self.shut
            else AdmissionVerdict("yes")
        )

    def payload(self, request_ids: list[int]) -> bytes | None:
        return None

    def finish(self, request_id: int) -> None:
        self.shut.discard(request_id)


def test_requests_that_wait_for_a_load_block_nobody() -> None:
    """REG-002, REG-008: what waits holds no blocks, so that two waits cannot lock each other."""
    hook = Shut(1, 2)
    clock = Clock()
    driver = Driver(make_spec(num_blocks=21, block_tokens=4), hooks=[hook], clock=clock)
    driver.add(make_request(1, 60), make_request(2, 60), make_request(3, 60, max_tokens=2))
    for _ in range(4):
        driver.step()
    assert driver.finished[3].reason == "length"
    assert driver.reason(1) == "load: loading"
    assert driver.ask("status")["held_blocks"] == 0
    driver.run()
    assert driver.core.idle_s == pytest.approx(HOOK_POLL_S), "the hooks are asked again by itself"
    hook.shut.clear()
    clock.now += 2 * HOOK_POLL_S
    driver.run()
    assert {f.reason for f in driver.finished.values()} == {"length"}
    held = {id: driver.finished[id].hook_wait_s for id in (1, 2, 3)}
    assert held == pytest.approx({1: 2 * HOOK_POLL_S, 2: 2 * HOOK_POLL_S, 3: 0.0}), "OBS-05"


# ENG-04


def test_a_prompt_beyond_the_pool_is_refused_at_once_with_both_numbers() -> None:
    """REG-004, REG-005: 49 usable blocks, prompts of 63; a small request behind them completes."""
    driver = Driver(make_spec(num_blocks=50, block_tokens=16, max_model_len=2048))
    driver.add(*(make_request(id, 1000) for id in range(5)), make_request(9, 10))
    driver.step()
    for id in range(5):
        error = driver.finished[id].error
        assert error is not None and error.kind == "ContextTooLong" and error.field == "prompt"
        assert "1000 tokens need 63 KV blocks, 49 are available" in error.message
    driver.run()
    assert len(driver.tokens[9]) == 8


def test_prompt_plus_max_tokens_beyond_the_pool_is_admitted_and_may_end_early() -> None:
    """REG-009."""
    plain = Driver(make_spec(num_blocks=11, block_tokens=4))
    plain.add(make_request(1, 30, max_tokens=100))
    plain.run()
    stop = plain.tokens[1][4]
    driver = Driver(make_spec(num_blocks=11, block_tokens=4))
    driver.add(make_request(1, 30, max_tokens=100, stop_ids=(stop,)))
    driver.run()
    assert driver.finished[1].reason == "stop" and driver.tokens[1] == plain.tokens[1][:5]


@pytest.mark.parametrize("overlap", [True, False])
def test_growing_out_of_the_pool_alone_ends_with_length(overlap: bool) -> None:
    """REG-006, REG-007: 10 usable blocks of 4 hold 40 tokens."""
    driver = Driver(make_spec(num_blocks=11, block_tokens=4, overlap=overlap))
    assert driver.core.hello().capacity_tokens == 40
    driver.add(make_request(1, 30, max_tokens=100))
    driver.run(max_steps=50)
    assert driver.finished[1].reason == "length" and len(driver.tokens[1]) == 10
    driver.assert_at_rest()


@pytest.mark.parametrize("prompt", [39, 40, 41])
def test_the_limit_of_the_pool_is_exact(prompt: int) -> None:
    driver = Driver(make_spec(num_blocks=11, block_tokens=4))
    driver.add(make_request(1, prompt, max_tokens=1))
    driver.run()
    assert driver.finished[1].reason == ("length" if prompt < 40 else "error")


def test_two_that_outgrow_the_pool_together_both_finish() -> None:
    driver = Driver(make_spec(num_blocks=21, block_tokens=4, prefix_caching=False))
    driver.add(make_request(1, 30, max_tokens=40), make_request(2, 30, max_tokens=40))
    driver.run(max_steps=300)
    assert [len(driver.tokens[id]) for id in (1, 2)] == [40, 40]
    assert driver.finished[1].num_preemptions == 0, "the first is never preempted for the second"
    assert driver.finished[2].num_preemptions > 0


# ENG-11: budget, chunks, rows


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 5])
def test_a_budget_below_the_number_of_rows_serves_all_in_turns(max_step_tokens: int) -> None:
    driver = Driver(make_spec(max_step_tokens=max_step_tokens, num_blocks=200))
    driver.add(*(make_request(id, 5, max_tokens=10) for id in range(1, 9)))
    driver.run(max_steps=400)
    assert all(len(driver.tokens[id]) == 10 for id in range(1, 9))


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    driver = Driver(make_spec(max_step_tokens=8, num_blocks=200, overlap=False))
    driver.add(make_request(1, 5, max_tokens=40))
    driver.step()
    driver.add(make_request(2, 70, max_tokens=1))
    for _ in range(9):
        before = len(driver.tokens[1])
        driver.step()
        assert len(driver.tokens[1]) == before + 1
        assert not driver.tokens[2]
    driver.step()
    assert driver.tokens[2], "70 tokens at 7 a step"


def test_no_step_is_idle_while_work_waits() -> None:
    driver = Driver(make_spec(max_running=2, num_blocks=64, overlap=False))
    driver.add(*(make_request(id, 10, max_tokens=5) for id in range(10)))
    steps = driver.core.counters
    while driver.core.has_work:
        before = steps.steps
        driver.step()
        assert steps.steps == before + 1 or not driver.core.requests


def test_waiting_for_a_row_is_said_so() -> None:
    driver = Driver(make_spec(max_running=1))
    driver.add(make_request(1, 5, max_tokens=50), make_request(2, 5), make_request(3, 5))
    driver.step()
    assert driver.reason(2) == "rows: all 1 are taken (max_running)"
    assert driver.ask("explain", ids=[3])["3"]["position"] == 1
    assert driver.ask("status")["waiting_by_reason"] == {"rows": 2}


def test_waiting_for_the_budget_is_said_so() -> None:
    driver = Driver(make_spec(max_step_tokens=16, num_blocks=200))
    driver.add(make_request(1, 60), make_request(2, 5))
    driver.step()
    assert driver.reason(2).startswith("budget: ")


# policies


def test_priority_goes_before_arrival() -> None:
    driver = Driver(make_spec(policy="priority", max_running=1))
    driver.add(
        *(
            make_request(id, 5, max_tokens=2, priority=p)
            for id, p in [(1, 2), (2, 1), (3, 1), (4, 0)]
        )
    )
    assert list(first_token_steps(driver, [1, 2, 3, 4])) == [4, 2, 3, 1]


def test_the_least_urgent_is_preempted_first() -> None:
    driver = Driver(make_spec(policy="priority", num_blocks=21, prefix_caching=False))
    driver.add(make_request(1, 30, max_tokens=30, priority=5))
    driver.add(make_request(2, 30, max_tokens=30, priority=0))
    driver.run()
    assert driver.finished[1].num_preemptions > 0 and driver.finished[2].num_preemptions == 0


def test_a_full_queue_makes_room_for_the_more_urgent() -> None:
    """1.2: under the priority policy the least urgent one that waits is refused instead."""
    driver = Driver(make_spec(policy="priority", max_running=1, max_queued_requests=2))
    driver.add(make_request(1, 5, max_tokens=9))
    driver.step()
    driver.add(
        make_request(2, 5, priority=3),
        make_request(3, 5, priority=2),
        make_request(4, 5, priority=1),
    )
    driver.add(make_request(5, 5, priority=4))
    driver.run()
    refused = {id for id, f in driver.finished.items() if f.error is not None}
    assert refused == {2, 5}


def served_by_tenant(weights: dict[str, float], *, backlog: int, steps: int) -> dict[str, int]:
    """Tokens (prompt and output) of each tenant after so many steps with everybody backlogged."""
    spec = make_spec(
        policy="fair", num_blocks=400, max_running=4, max_step_tokens=64, max_queued_requests=10_000
    )
    driver = Driver(spec, check=False)
    id = 0
    for tenant, weight in weights.items():
        for _ in range(backlog):
            id += 1
            size = 4 + (id * 7) % 20 if tenant != "big" else 60
            driver.add(make_request(id, size, max_tokens=1 + id % 12, tenant=tenant, weight=weight))
    owner = {request.id: request.wire for request in driver.core.requests}
    for _ in range(steps):
        driver.step()
    spent = Counter(dict.fromkeys(weights, 0))
    for request_id, wire in owner.items():
        if request_id in driver.finished or driver.tokens[request_id]:
            spent[wire.tenant] += len(wire.prompt) // 4 + len(driver.tokens[request_id])
    return dict(spent)


def test_the_servers_weights_stand_above_those_of_requests() -> None:
    """Defect: there was no way to set tenants' weights."""
    spec = make_spec(policy="fair", max_running=2, num_blocks=200, tenant_weights={"a": 3.0})
    driver = Driver(spec, check=False)
    for id in range(400):
        driver.add(make_request(id, 10, max_tokens=6, tenant="ab"[id % 2], weight=1.0))
    for _ in range(300):
        driver.step()
    ended = [driver.core.counters.finished["length"]]
    waiting = Counter(request.wire.tenant for request in driver.core.scheduler.queue)
    served = {tenant: 200 - waiting[tenant] for tenant in "ab"}
    assert ended[0] > 60
    assert 2.5 < served["a"] / served["b"] < 3.5


def test_backlogged_tenants_share_tokens_by_weight() -> None:
    spent = served_by_tenant({"a": 1.0, "b": 1.0, "c": 2.0, "big": 4.0}, backlog=600, steps=1000)
    unit = sum(spent.values()) / 8
    for tenant, weight in {"a": 1, "b": 1, "c": 2, "big": 4}.items():
        assert spent[tenant] / unit / weight == pytest.approx(1.0, rel=0.05), spent


def test_a_backlog_does_not_delay_another_tenant() -> None:
    spec = make_spec(policy="fair", max_running=2, num_blocks=200, max_queued_requests=1000)
    driver = Driver(spec)
    driver.add(*(make_request(id, 20, max_tokens=5, tenant="hog") for id in range(1, 200)))
    for _ in range(50):
        driver.step()
    driver.add(make_request(999, 20, max_tokens=5, tenant="guest"))
    begin = driver.num_steps
    while 999 not in driver.finished:
        driver.step()
    assert driver.num_steps - begin < 16


def test_a_newcomer_shares_from_now_on_and_need_not_be_paid_for_the_past() -> None:
    spec = make_spec(policy="fair", max_running=2, num_blocks=200, max_queued_requests=10_000)
    driver = Driver(spec, check=False)
    driver.add(*(make_request(id, 10, max_tokens=5, tenant="old") for id in range(1, 1500)))
    for _ in range(600):
        driver.step()
    before = len(driver.finished)
    driver.add(*(make_request(id, 10, max_tokens=5, tenant="new") for id in range(2000, 3500)))
    for _ in range(600):
        driver.step()
    new = sum(id >= 2000 for id in driver.finished)
    old = len(driver.finished) - before - new
    assert 0.9 < old / new < 1.1, (old, new)


# preemption


@pytest.mark.parametrize("window", [None, 6])
def test_preempted_requests_give_the_same_tokens_and_logprobs(window: int | None) -> None:
    """1.9: a pool of a fifth of the need."""
    groups = None if window is None else window_groups(window)
    results = []
    for num_blocks in (600, 62):
        spec = make_spec(num_blocks=num_blocks, max_running=8)
        driver = Driver(spec, groups=groups) if groups else Driver(spec)
        sampling = make_request(0).sampling
        scored = msgspec.structs.replace(sampling, logprobs=2, prompt_logprobs=1)
        driver.add(*(make_request(id, 20, max_tokens=60, sampling=scored) for id in range(1, 16)))
        driver.run()
        results.append((dict(driver.tokens), dict(driver.prompt_scores)))
        logprobs = [len(scores) for scores in driver.logprobs.values()]
        assert logprobs == [60] * 15
        assert driver.prompt_scores[3] == list(range(1, 20)), "each prompt token is scored once"
        preemptions = driver.ask("status")["preemptions"]
        assert (preemptions > 0) == (num_blocks == 62)
    assert results[0] == results[1]


def test_a_preempted_request_goes_before_later_arrivals() -> None:
    driver = Driver(make_spec(num_blocks=21, prefix_caching=False))
    driver.add(make_request(1, 30, max_tokens=40), make_request(2, 30, max_tokens=40))
    while not driver.core.scheduler.num_preemptions:
        driver.step()
    assert driver.core.requests[2].state is RequestState.PREEMPTED
    known = len(driver.tokens[2])
    driver.add(make_request(3, 60, max_tokens=10))
    first_token_steps(driver, [3])
    assert len(driver.tokens[2]) > known


def test_the_wait_of_a_preempted_request_has_a_reason() -> None:
    driver = Driver(make_spec(num_blocks=21, prefix_caching=False))
    driver.add(make_request(1, 30, max_tokens=40), make_request(2, 30, max_tokens=40))
    while not driver.core.scheduler.num_preemptions:
        driver.step()
    assert driver.reason(2).startswith(("preempted", "KV blocks"))


@pytest.mark.parametrize("prompt", range(28, 32))
@pytest.mark.parametrize("num_blocks", range(36, 38))
@pytest.mark.parametrize("window", [None, 6])
def test_a_decode_already_in_the_step_may_be_preempted_for_a_better_prefill(
    prompt: int, num_blocks: int, window: int | None
) -> None:
    """The prefill was promised its blocks, but the decode has grown meanwhile, at times in this very step."""
    spec = make_spec(
        policy="priority",
        num_blocks=num_blocks if window is None else num_blocks + 18,
        max_step_tokens=9,
        prefix_caching=False,
    )
    driver = Driver(spec, groups=FULL if window is None else window_groups(window))
    driver.add(make_request(1, prompt, max_tokens=50, priority=5))
    for _ in range(5):
        driver.step()
    driver.add(make_request(2, 100, max_tokens=5, priority=0))
    while 2 not in driver.finished:
        assert not (driver.core.requests[2].num_preemptions)
        driver.step()
    driver.run()
    if window is None:
        assert driver.finished[1].num_preemptions > 0
    driver.assert_at_rest()
    assert [len(driver.tokens[id]) for id in (1, 2)] == [50, 5]


def test_prompt_tokens_scored_before_a_preemption_are_not_scored_again() -> None:
    """Chunks of 6 tokens beside a decode, then of 7 alone: the stretches overlap in part."""
    spec = make_spec(policy="priority", num_blocks=16, max_step_tokens=7, prefix_caching=False)
    driver = Driver(spec)
    driver.add(make_request(1, 12, max_tokens=40, priority=0))
    driver.step()
    driver.step()
    driver.step()
    scoring = msgspec.structs.replace(make_request(2).sampling, prompt_logprobs=1)
    driver.add(make_request(2, 40, max_tokens=5, priority=5, sampling=scoring))
    driver.run()
    assert driver.finished[2].num_preemptions > 0
    assert driver.prompt_scores[2] == list(range(1, 40))


def test_admission_leaves_running_requests_a_block_to_grow() -> None:
    driver = Driver(make_spec(num_blocks=15, prefix_caching=False))
    driver.add(make_request(1, 15, max_tokens=5))
    driver.step()
    driver.add(make_request(2, 40, max_tokens=1))
    driver.step()
    assert started(driver) == {1}
    driver.run()
    assert driver.core.scheduler.num_preemptions == 0


def test_the_cost_of_the_scan_is_bounded() -> None:
    """A full pool with a long queue: at most MAX_LOOKS waiting requests are tried in a step."""
    driver = crowd(max_queued_requests=5000)
    driver.add(*(make_request(id, 300, max_tokens=1) for id in range(10, 2000)))
    driver.step()
    assert sum(r.passed_over for r in driver.core.requests) <= 64


def test_clock_of_a_core_is_its_own() -> None:
    clock = Clock()
    driver = Driver(make_spec(), clock=clock)
    driver.add(make_request(1, 4, max_tokens=3))
    clock.now += 2.0
    driver.step()
    clock.now += 3.0
    driver.run()
    finished = driver.finished[1]
    assert (finished.scheduled_s, finished.total_s) == (2.0, 5.0)


def test_adapters_share_where_the_policy_says_so() -> None:
    """One adapter's crowd of one tenant does not hold up another adapter's request, nor the base's."""
    spec = SchedulerSpec(max_step_tokens=1, max_running=1, policy="fair-adapters")
    queue, _ = order_of(spec, num_rows=4, match=lambda request: 0)
    crowd, other = LoadedAdapter(name="crowd"), LoadedAdapter(name="other")
    adapters = [crowd] * 4 + [other, BASE]
    for number, adapter in enumerate(adapters):
        request = Request(
            make_request(number),
            arrival=number,
            now=0.0,
            groups=1,
            length_limit=99,
            adapter=adapter,
        )
        request.key = (number,)
        queue.push(request)
    started = []
    for row in range(3):
        request = next(iter(queue.scan()))
        request.row = row
        queue.started(request)
        queue.remove(request)
        started.append(request.adapter.name)
    assert sorted(started) == ["", "crowd", "other"]
