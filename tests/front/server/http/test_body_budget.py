"""The memory of all bodies together: room in all, each key's half, a bounded wait, a least rate (security P9, P21)."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable

import pytest

from headrace.base.config.server_options import ServerOptions
from headrace.base.errors import ConfigError, RateLimited, RequestError, Unavailable
from headrace.front.server.http.body_budget import (
    FREE_BYTES,
    MAX_WAITING,
    MIN_BYTES_PER_S,
    BodyBudget,
    BodyRoom,
    BodyTimeout,
    check_rate,
)
from headrace.launch.resolve import server_spec

MIB = 1 << 20
LONG_S = 60.0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_first_bytes_of_a_body_are_free() -> None:
    budget = BodyBudget(2)
    room = BodyRoom(budget, "a")
    await room.grow_to(FREE_BYTES, wait_s=0)
    assert budget.held_bytes == 0
    await room.grow_to(FREE_BYTES + 1, wait_s=0)
    assert budget.held_bytes == 1
    room.close()
    room.close()
    assert budget.held_bytes == 0


async def test_a_key_has_half_and_all_together_have_the_whole() -> None:
    budget = BodyBudget(4 * MIB)
    await budget.take("a", 2 * MIB, wait_s=0)
    with pytest.raises(RateLimited, match="2097152 bytes here, with 1 more than the 2097152"):
        await budget.take("a", 1, wait_s=0)
    await budget.take("b", 2 * MIB, wait_s=0)
    with pytest.raises(Unavailable, match="hold 4194304 bytes here, with 1 more") as refused:
        await budget.take("c", 1, wait_s=0)
    assert not isinstance(refused.value, RateLimited) and refused.value.retry_after_s
    budget.give_back("b", 2 * MIB)
    await budget.take("c", 2 * MIB, wait_s=0)


async def test_a_body_that_finds_no_room_waits_for_some() -> None:
    budget = BodyBudget(2 * MIB)
    await budget.take("a", MIB, wait_s=0)
    waiting = asyncio.ensure_future(budget.take("a", MIB, wait_s=LONG_S))
    await settle()
    assert not waiting.done()
    budget.give_back("a", MIB // 2)
    await settle()
    assert not waiting.done() and budget.held_bytes == MIB // 2
    budget.give_back("a", MIB // 2)
    await asyncio.wait_for(waiting, LONG_S)
    assert budget.held_bytes == MIB


async def test_the_wait_is_bounded_in_time_and_in_number() -> None:
    budget = BodyBudget(2 * MIB)
    await budget.take("a", MIB, wait_s=0)
    with pytest.raises(RateLimited):
        await budget.take("a", 1, wait_s=0.01)
    waiting = [
        asyncio.ensure_future(budget.take("a", 1, wait_s=LONG_S)) for _ in range(MAX_WAITING)
    ]
    await settle()
    with pytest.raises(RateLimited):
        await budget.take("a", 1, wait_s=LONG_S)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert budget.held_bytes == MIB, "who leaves while waiting has taken nothing"
    budget.give_back("a", MIB)
    await budget.take("a", MIB, wait_s=0)


async def test_any_order_of_bodies_keeps_the_bounds_and_leaves_nothing() -> None:
    rng, budget = random.Random(3), BodyBudget(8 * MIB)
    refused = 0

    async def body(tenant: str) -> None:
        nonlocal refused
        room = BodyRoom(budget, tenant)
        size = 0
        try:
            for _ in range(rng.randrange(1, 6)):
                size += rng.randrange(MIB)
                await room.grow_to(size, wait_s=rng.choice([0, 0.001, 0.01]))
                assert budget.held_bytes <= 8 * MIB
                await asyncio.sleep(0)
        except (RateLimited, Unavailable):
            refused += 1
        finally:
            room.close()

    await asyncio.gather(*(body(rng.choice("abc")) for _ in range(300)))
    assert refused and budget.held_bytes == 0


async def test_memory_is_given_back_behind_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 240 bodies of up to 8 MiB the C library kept 1 GiB."""
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr("headrace.front.server.http.body_budget.TRIM_PERIOD_S", 0.0)
    budget = BodyBudget(2 * MIB, trim=lambda: loop.call_soon_threadsafe(trimmed.set))
    await budget.take("a", MIB, wait_s=0)
    await settle()
    assert not trimmed.is_set()
    budget.give_back("a", MIB)
    await asyncio.wait_for(trimmed.wait(), LONG_S)


async def test_documents_that_only_their_failures_hold_end_once_bodies_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure refers to the frame that holds the document, and this to the failure."""
    for name in ("TRIM_PERIOD_S", "QUIET_S"):
        monkeypatch.setattr(f"headrace.front.server.http.body_budget.{name}", 0.0)
    trims: list[bool] = []
    budget = BodyBudget(2 * MIB, trim=lambda: trims.append(held() is None))
    document = Document()
    document.failure = document
    held = weakref.ref(document)
    await budget.take("a", MIB, wait_s=0)
    del document
    budget.give_back("a", MIB)
    await asyncio.wait_for(until(lambda: bool(trims)), LONG_S)
    assert trims[-1]


class Document:
    """What a body was read into."""

    failure: object = None


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_slow_body_keeps_its_room_for_a_bounded_time() -> None:
    check_rate(10 * MIN_BYTES_PER_S, 14.9, grace_s=5)
    with pytest.raises(BodyTimeout, match="brought 1310720 bytes in 15 s") as slow:
        check_rate(10 * MIN_BYTES_PER_S, 15.1, grace_s=5)
    assert isinstance(slow.value, RequestError) and slow.value.status == 408


def test_the_budget_holds_eight_of_the_largest_bodies_and_at_least_two() -> None:
    assert server_spec(ServerOptions(max_body_bytes="1MiB")).body_budget_bytes == 8 * MIB
    two = ServerOptions(max_body_bytes="1MiB", body_budget_bytes="2MiB")
    assert server_spec(two).body_budget_bytes == 2 * MIB
    with pytest.raises(ConfigError, match=r"--body-budget-bytes: 1.9MiB given; at least twice"):
        server_spec(ServerOptions(max_body_bytes="1MiB", body_budget_bytes="1.9MiB"))
