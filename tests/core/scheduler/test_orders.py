"""Orders of the waiting requests that follow the cache or what runs, and `--no-evict`: on whole cores."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.errors import Unsupported
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.retention import ROUTING_KEY, EngineHints
from headrace.core.scheduler.full_lengths import FullLengths
from headrace.core.scheduler.orders import MAX_OVERTAKEN, RankedQueue, RoutingKeys
from tests.core.harness import Driver, make_request, make_spec

TREE = {"a": list(range(100, 116)), "b": list(range(200, 216))}


def one_at_a_time(policy: str, **fields: object) -> Driver:
    """One row, so that the order of starts is the order of ends; the tree's two prompts are cached."""
    hooks = [RoutingKeys()] if policy == "routing-key" else []
    driver = Driver(make_spec(policy=policy, max_running=1, block_tokens=4), hooks=hooks)
    for id, prompt in enumerate(TREE.values(), start=900):
        driver.add(make_request(id, prompt, max_tokens=1))
        driver.run()
    driver.finished.clear()
    return driver


def ended(driver: Driver, *requests: EngineRequest) -> list[int]:
    driver.add(*requests)
    driver.run()
    return list(driver.finished)


def test_the_longest_prefix_in_the_cache_goes_first() -> None:
    """BEY-40: lpm."""
    driver = one_at_a_time("lpm")
    order = ended(
        driver,
        make_request(1, 12, max_tokens=1),
        make_request(2, [*TREE["a"][:8], 7, 8], max_tokens=1),
        make_request(3, [*TREE["b"], 7, 8], max_tokens=1),
    )
    assert order == [3, 2, 1]
    driver.assert_at_rest()


def test_the_branch_under_which_most_requests_wait_goes_first() -> None:
    """BEY-40: dfs-weight: what lies deeper goes first, and of equal branches that of the earlier request."""
    driver = one_at_a_time("dfs-weight")
    order = ended(
        driver,
        make_request(1, [*TREE["a"], 7], max_tokens=1),
        make_request(2, [*TREE["b"][:8], 7], max_tokens=1),
        make_request(3, 9, max_tokens=1),
        make_request(4, [*TREE["b"], 7], max_tokens=1),
        make_request(5, [*TREE["b"][:12], 7], max_tokens=1),
    )
    assert order == [4, 5, 1, 2, 3]


def test_the_longest_output_goes_first() -> None:
    """BEY-40: lof."""
    driver = one_at_a_time("lof")
    requests = [make_request(id, 8, max_tokens=n) for id, n in ((1, 2), (2, 9), (3, 5))]
    assert ended(driver, *requests) == [2, 3, 1]


def with_key(id: int, key: str, max_tokens: int = 1) -> EngineRequest:
    hints = EngineHints(routing_key=key)
    return make_request(id, 8, max_tokens=max_tokens, hook_payloads=hints.payloads(""))


def test_the_key_that_most_running_requests_have_goes_first() -> None:
    """BEY-40: routing-key."""
    spec = make_spec(policy="routing-key", max_running=3, block_tokens=4)
    driver = Driver(spec, hooks=[RoutingKeys()])
    driver.add(*(with_key(id, key, 30) for id, key in ((1, "x"), (2, "y"), (3, "y"))))
    driver.step()
    driver.add(with_key(4, "z"), with_key(5, "x"), with_key(6, "y"))
    driver.core.abort([1])
    driver.run()
    assert [id for id in driver.finished if id > 3] == [6, 4, 5]
    driver.assert_at_rest()


def test_a_routing_key_is_refused_where_it_orders_nothing_or_is_none() -> None:
    driver = Driver(make_spec())
    driver.add(with_key(1, "x"))
    driver.step()
    error = driver.finished[1].error
    assert error is not None and error.kind == Unsupported.__name__
    assert "--policy routing-key" in error.message
    driver = one_at_a_time("routing-key")
    raw = {ROUTING_KEY: msgspec.Raw(msgspec.msgpack.encode(["x"]))}
    driver.add(make_request(1, 8, hook_payloads=raw), with_key(2, "k" * 129))
    driver.step()
    assert [e.error is not None for e in driver.finished.values()] == [True, True]


def test_none_is_overtaken_for_ever() -> None:
    """Whoever comes later is ranked better each time."""
    driver = one_at_a_time("lpm")
    driver.add(make_request(1, 12, max_tokens=1))
    count = 0
    while 1 not in driver.finished:
        count += 1
        assert count < 200
        driver.add(*(make_request(10 * count + i, [*TREE["a"], 7], max_tokens=1) for i in (0, 1)))
        driver.step()
    assert count > 10 and isinstance(driver.core.scheduler.queue, RankedQueue)
    assert sum(id >= 10 for id in driver.finished) >= MAX_OVERTAKEN
    driver.run()
    assert not driver.core.scheduler.queue._overtaken


@pytest.mark.parametrize("no_evict", [False, True])
def test_what_starts_keeps_its_place_under_no_evict(no_evict: bool) -> None:
    """BEY-41: the capacity policy; without it the same requests preempt each other."""
    hooks = [FullLengths(lambda: driver.core.kv, 64)] if no_evict else []
    driver = Driver(make_spec(num_blocks=21, block_tokens=4, prefix_caching=False), hooks=hooks)
    driver.add(*(make_request(id, 20, max_tokens=20) for id in (1, 2, 3)))
    driver.step()
    if no_evict:
        assert driver.reason(3) == (
            "no_evict: KV blocks: needs 10 to its end, 20 of 20 are promised"
        )
    driver.run()
    assert (driver.core.scheduler.num_preemptions == 0) == no_evict
    assert {end.reason for end in driver.finished.values()} == {"length"}
    driver.assert_at_rest()
