"""How long a piece of work takes and how that grows, where other tests run beside it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from tests.stopwatch import BESIDE_OTHERS

LINEAR = 2.3
"""The bound of t(2n) / t(n); kept for larger steps it leaves noise more room, and quadratic time less."""
ROUNDS = 6


def fastest(
    work: Callable[[], object], rounds: int = 3, clock: Callable[[], float] = time.thread_time
) -> float:
    """Seconds of the quickest round, by default of this thread on a processor. Garbage is not collected meanwhile: what
    that costs depends on all that other tests have left in the process."""
    times = []
    gc.disable()
    try:
        for _ in range(rounds):
            begin = clock()
            work()
            times.append(clock() - begin)
    finally:
        gc.enable()
    return min(times)


def assert_within(work: Callable[[], object], at_most_s: float) -> None:
    """`work` takes so much of a processor's time. Beside other tests it is done once and no time is looked at: a test
    that asks this is marked `serial`."""
    if BESIDE_OTHERS:
        work()
        return
    spent_s = fastest(work)
    assert spent_s < at_most_s, spent_s


def assert_linear(work: Callable[[int], object], size: int, times: int = 8) -> None:
    """`work` of `times` as much takes at most 2.3 times its share; quadratic time takes `times` times that. Other load
    takes caches away and only ever adds time: where the bound seems broken, more rounds are measured."""
    once, more = float("inf"), float("inf")
    for _ in range(ROUNDS):
        once = min(once, fastest(lambda: work(size)))
        more = min(more, fastest(lambda: work(size * times)))
        if more < LINEAR * times * once:
            return
    raise AssertionError((once, more))
