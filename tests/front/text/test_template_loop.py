"""Renders without a thread (P11): the same answers as the pool's, and one that is slow or deadly is alone with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.text.template_loop import LoopRenderer
from headrace.front.text.template_pool import TemplateLimits, TemplatePool
from tests.stopwatch import Stopwatch

LIMITS = TemplateLimits(seconds=3.0, max_chars=100_000, memory_bytes=512 << 20)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def pool() -> Iterator[TemplatePool]:
    made = TemplatePool(LIMITS, size=2)
    assert made.render("warm", {}) == "warm"
    yield made
    made.close()


@pytest.fixture
def short(pool: TemplatePool) -> Iterator[LoopRenderer]:
    made = LoopRenderer(pool)
    yield made
    made.close()
    assert pool._slots.qsize() == 2


async def test_many_at_once_are_each_answered_with_their_own(short: LoopRenderer) -> None:
    asked = [short.render("{{ i }}" + "x" * (i % 7), {"i": i}) for i in range(300)]
    assert await asyncio.gather(*asked) == [f"{i}" + "x" * (i % 7) for i in range(300)]


async def test_an_answer_longer_than_the_pipe_comes_whole(short: LoopRenderer) -> None:
    text = await short.render("{{ 'é' * 90000 }}", {})
    assert text == "é" * 90_000


async def test_a_template_that_raises_fails_its_own_request(short: LoopRenderer) -> None:
    found = await asyncio.gather(
        *(short.render(s, {}) for s in ("a", "{{ raise_exception('no') }}", "b")),
        return_exceptions=True,
    )
    assert found[0] == "a" and found[2] == "b"
    assert isinstance(found[1], InvalidRequest) and "no" in found[1].message


@pytest.mark.serial
async def test_nobody_waits_behind_an_endless_one(short: LoopRenderer) -> None:
    slow = asyncio.ensure_future(short.render(ENDLESS, {}))
    await asyncio.sleep(0)
    behind = [short.render("{{ i }}", {"i": i}) for i in range(10)]
    watch = Stopwatch()
    assert await asyncio.gather(*behind) == [str(i) for i in range(10)]
    assert watch.undisturbed_s < LIMITS.seconds and not slow.done()
    with pytest.raises(InvalidRequest, match="longer than 3 s"):
        await slow
    assert await short.render("again", {}) == "again"


async def test_a_process_that_dies_costs_only_the_request_it_was_at(short: LoopRenderer) -> None:
    slow = asyncio.ensure_future(short.render(ENDLESS, {}))
    other = asyncio.ensure_future(short.render("b", {}))
    await asyncio.sleep(0)
    assert short._worker is not None
    short._worker._child._process.kill()
    with pytest.raises(InvalidRequest, match="ended the process"):
        await slow
    assert await other == "b" and await short.render("c", {}) == "c"


async def test_a_request_that_is_given_up_leaves_the_order_of_the_others(
    short: LoopRenderer,
) -> None:
    tasks = [asyncio.ensure_future(short.render("{{ i }}", {"i": i})) for i in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[i] for i in (0, 1, 3, 4, 5)] == ["0", "1", "3", "4", "5"]
    assert isinstance(found[2], asyncio.CancelledError)
