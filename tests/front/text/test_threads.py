"""Work on texts in threads: bounded, the short before the long, and over when its client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from headrace.base.errors import Unavailable
from headrace.front.text.threads import (
    INLINE_CHARS,
    MAX_WAITING_CHARS,
    SHORT_CHARS,
    TextThreads,
    WorkStopped,
    checkpoint,
)

LONG = SHORT_CHARS + 1


async def held(threads: TextThreads, release: threading.Event) -> asyncio.Task[bool]:
    """The one thread for long texts is busy until it is released."""
    begun = threading.Event()

    def hold() -> bool:
        begun.set()
        return release.wait(300)

    task = asyncio.ensure_future(threads.run(LONG, hold))
    await asyncio.to_thread(begun.wait, 60)
    return task


def noting(order: list[int], number: int) -> Callable[[], None]:
    return lambda: order.append(number)


async def test_what_is_short_needs_no_thread_and_the_rest_leaves_the_loop() -> None:
    threads = TextThreads(1)
    here = threading.get_ident()
    assert await threads.run(INLINE_CHARS - 1, threading.get_ident) == here
    assert await threads.run(INLINE_CHARS, threading.get_ident) != here
    assert await threads.run(LONG, threading.get_ident) != here


async def test_work_that_asks_for_work_does_it_itself() -> None:
    threads = TextThreads(1)

    def outer() -> bool:
        inner = asyncio.run(threads.run(LONG, threading.get_ident))
        return inner == threading.get_ident()

    assert await asyncio.wait_for(threads.run(LONG, outer), 60)


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    threads, release = TextThreads(1), threading.Event()
    busy = await held(threads, release)
    assert await threads.run(SHORT_CHARS, lambda: "done") == "done"
    release.set()
    assert await busy


async def test_of_those_that_wait_the_shorter_goes_first() -> None:
    threads, release, order = TextThreads(1), threading.Event(), list[int]()
    busy = await held(threads, release)
    sizes = [64 * LONG, 32 * LONG, LONG]
    waiting = [
        asyncio.ensure_future(threads.run(size, noting(order, i))) for i, size in enumerate(sizes)
    ]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(busy, *waiting)
    assert order == [2, 1, 0]


async def test_work_whose_client_leaves_before_it_begins_is_never_begun() -> None:
    threads, release, order = TextThreads(1), threading.Event(), list[int]()
    busy = await held(threads, release)
    left = asyncio.ensure_future(threads.run(MAX_WAITING_CHARS, noting(order, 1)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    other = asyncio.ensure_future(threads.run(MAX_WAITING_CHARS, noting(order, 3)))
    await asyncio.sleep(0)
    assert not other.done(), "there is room for it"
    release.set()
    await asyncio.gather(busy, other)
    order.remove(3)
    await threads.run(LONG, noting(order, 2))
    assert order == [2]


async def test_work_whose_client_leaves_ends_at_its_next_checkpoint() -> None:
    threads, begun, ended = TextThreads(1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                checkpoint()
        except WorkStopped:
            ended.set()

    task = asyncio.ensure_future(threads.run(LONG, work))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    assert await asyncio.to_thread(ended.wait, 60)
    checkpoint()  # nothing to anybody else


async def test_what_waits_is_bounded_and_says_when_to_come_back() -> None:
    threads, release = TextThreads(1), threading.Event()
    busy = await held(threads, release)
    most = asyncio.ensure_future(threads.run(MAX_WAITING_CHARS, lambda: 1))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=str(MAX_WAITING_CHARS)) as caught:
        await threads.run(LONG, lambda: 2)
    assert caught.value.retry_after_s
    release.set()
    assert await busy and await most == 1
    assert await threads.run(LONG, lambda: 3) == 3


async def test_a_failure_is_its_waiters_own_whatever_it_is() -> None:
    class Panic(BaseException):
        """As of a library in another language."""

    def work() -> None:
        raise Panic

    threads = TextThreads(1)
    with pytest.raises(Panic):
        await threads.run(LONG, work)
    assert await threads.run(LONG, lambda: 1) == 1, "the thread lives"
