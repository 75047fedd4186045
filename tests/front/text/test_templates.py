"""Renders in processes (P11): what is slow or deadly is refused and alone with it, in a thread of the
pool and, without a thread, on the event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.base.errors import InvalidRequest, Unavailable
from headrace.front.text.templates import LoopRenderer, TemplateLimits, TemplatePool, Worker
from tests.stopwatch import Stopwatch

LIMITS = TemplateLimits(seconds=60.0, max_chars=10_000, memory_bytes=512 << 20)
"""Of what is not to end by its time, however busy the machine is."""
HASTY = TemplateLimits(seconds=1.0, max_chars=10_000, memory_bytes=512 << 20)
LOOP_LIMITS = TemplateLimits(seconds=3.0, max_chars=100_000, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def pool():
    made = TemplatePool(LIMITS, size=2)
    assert made.render("warm", {}) == "warm"
    yield made
    made.close()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "endless loop": (ENDLESS, "longer than 1 s"),
    "huge range": ("{% for a in range(10**12) %}{% endfor %}", "[Rr]ange"),
    "repetition": ("{{ 'a' * 10**10 }}", "repetition"),
    "repetition from the left": ("{{ 10**10 * 'a' }}", "repetition"),
    "power": ("{{ 10 ** (10 ** 10) }}", "exponent"),
    "memory": ("{% set ns = namespace(s='a' * 999999) %}{% for i in range(40) %}"
               "{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
    "output": ("{% for a in range(20000) %}x{% endfor %}", "more than 10000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses|Recursion"),
    "raise_exception": ("{{ raise_exception('no ' ~ 'tools') }}", "no tools"),
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|undefined"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
}  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_within_the_limit_and_harm_nobody(pool, name, monkeypatch):
    """P11, T11."""
    source, message = BOMBS[name]
    watch = Stopwatch()
    with monkeypatch.context() as hasty, pytest.raises(InvalidRequest, match=message) as caught:
        if name == "endless loop":
            hasty.setattr(pool, "limits", HASTY)
        pool.render(source, {"messages": []})
    assert watch.undisturbed_s < 2 * HASTY.seconds
    assert caught.value.field == "messages"
    assert pool.render("{{ x }} again", {"x": "well"}) == "well again"


def test_another_render_goes_on_beside_an_endless_one(pool):
    failed = []
    worker = pool._slots.get()
    assert worker is not None

    def endless():
        try:
            worker.ask(ENDLESS, worker.frame(ENDLESS, {}), LIMITS.seconds)
        except Unavailable as error:
            failed.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    assert [pool.render("{{ i }}", {"i": i}) for i in range(20)] == [str(i) for i in range(20)]
    assert not failed
    worker._child._process.kill()
    thread.join()
    pool.give(None)
    assert len(failed) == 1, "it was at it all the time"


def test_no_free_process_is_an_overload():
    pool = TemplatePool(TemplateLimits(seconds=0.05), size=0)
    with pytest.raises(Unavailable) as caught:
        pool.render("x", {})
    assert caught.value.retry_after_s


def test_a_killed_process_is_replaced():
    pool = TemplatePool(LIMITS, size=1)
    try:
        assert pool.render("a", {}) == "a"
        worker = pool._slots.queue[0]
        worker._child._process.kill()
        worker._child._process.wait()
        assert pool.render("b", {}) == "b"
    finally:
        pool.close()


def test_large_texts_pass_through_the_pipes():
    pool = TemplatePool(TemplateLimits(seconds=60.0), size=1)
    try:
        text = "é" * 1_000_000
        assert pool.render("{{ text }}", {"text": text}) == text
    finally:
        pool.close()


def test_names_are_the_variables_a_template_reads(pool):
    assert pool.names("{{ a }}{% set b = 1 %}{{ b }}{% for c in d %}{{ c }}{% endfor %}") == [
        "a",
        "d",
    ]


def test_a_servers_own_template_is_compiled_however_long_renders_may_take():
    """A start on a busy machine was refused: the template took longer than a request's render may."""
    pool = TemplatePool(TemplateLimits(seconds=1e-6), size=1)
    try:
        assert pool.names("{{ a }}") == ["a"]
    finally:
        pool.close()


def test_an_empty_template_is_empty_also_under_a_number_given_anew():
    """It was looked for under its number: a failure, or another request's template once numbers are given anew."""
    pool = TemplatePool(LIMITS, size=1)
    for i in range(32):
        assert pool.render(f"secret {i}", {}) == f"secret {i}"
    assert pool.render("", {}) == ""
    assert pool.render("", {}) == ""
    pool.close()


@pytest.fixture
def pool_of_two() -> Iterator[TemplatePool]:
    """Both processes run: who waits for one waits for no start of the other."""
    made = TemplatePool(LOOP_LIMITS, size=2)
    first, second = Worker(LOOP_LIMITS), Worker(LOOP_LIMITS)
    for worker in (first, second):
        made._slots.get()
        made.give(worker)
    yield made
    made.close()


@pytest.fixture
def short(pool_of_two: TemplatePool) -> Iterator[LoopRenderer]:
    made = LoopRenderer(pool_of_two)
    yield made
    made.close()
    assert pool_of_two._slots.qsize() == 2


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


@pytest.mark.slow
@pytest.mark.serial
async def test_nobody_waits_behind_an_endless_one(short: LoopRenderer) -> None:
    watch = Stopwatch()
    slow = asyncio.ensure_future(short.render(ENDLESS, {}))
    await asyncio.sleep(0)
    behind = [short.render("{{ i }}", {"i": i}) for i in range(10)]
    assert await asyncio.gather(*behind) == [str(i) for i in range(10)]
    assert watch.undisturbed_s < LOOP_LIMITS.seconds
    assert not slow.done() or watch.wall_s >= LOOP_LIMITS.seconds
    with pytest.raises(InvalidRequest, match="longer than 3 s"):
        await slow
    assert await short.render("again", {}) == "again"


async def test_a_process_that_dies_costs_only_the_request_it_was_at(short: LoopRenderer) -> None:
    slow = asyncio.ensure_future(short.render(ENDLESS, {}))
    other = asyncio.ensure_future(short.render("b", {}))
    await asyncio.sleep(0)
    assert short._worker is not None
    short._worker._child._process.kill()
    with pytest.raises(Unavailable, match="was killed"):
        await slow
    assert await other == "b" and await short.render("c", {}) == "c"


def test_a_process_that_is_killed_over_a_request_is_no_fault_of_it():
    worker = Worker(LIMITS)
    worker._child._process.kill()
    with pytest.raises(Unavailable, match="was killed") as caught:
        worker.ask("a", worker.frame("a", {}), 60.0)
    assert caught.value.status == 503 and caught.value.retry_after_s
    worker.close()


def test_a_process_that_is_stopped_over_a_request_is_no_fault_of_it():
    worker = Worker(LIMITS)
    worker._child._process.send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="was stopped") as caught:
        worker.ask("a", worker.frame("a", {}), 0.05)
    assert caught.value.status == 503 and caught.value.retry_after_s
    worker.close()


async def test_what_a_stopped_process_was_asked_goes_another_way(short: LoopRenderer) -> None:
    assert await short.render("a", {}) == "a"
    assert short._worker is not None
    short._worker._child._process.send_signal(signal.SIGSTOP)
    assert await asyncio.gather(short.render("b", {}), short.render("c", {})) == ["b", "c"]


async def test_a_request_that_is_given_up_leaves_the_order_of_the_others(
    short: LoopRenderer,
) -> None:
    tasks = [asyncio.ensure_future(short.render("{{ i }}", {"i": i})) for i in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[i] for i in (0, 1, 3, 4, 5)] == ["0", "1", "3", "4", "5"]
    assert isinstance(found[2], asyncio.CancelledError)
