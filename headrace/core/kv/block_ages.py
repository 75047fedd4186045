"""How long cached blocks live, lie idle and are found again, of a sample of them
(`--watched-blocks`)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from headrace.core.kv.pool import KVPool

SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""Greatest age of each bucket but the last, which has no bound."""


class Ages:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def report(self) -> dict[str, float]:
        """Greatest value of a bucket -> count; "sum" of all."""
        return {
            **dict(zip([*map(str, SECONDS), "inf"], self._counts, strict=True)),
            "sum": self.sum,
        }


Block = tuple[int, int]
"""Group and number."""


class BlockAges:
    """Of every `every`-th block that is taken: `lifetime` until its content is given up for
    another, `idle` since it was last held, and between two uses, `reuse_gap`."""

    def __init__(self, every: int, clock: Callable[[], float]) -> None:
        self._every, self._clock, self._count = every, clock, 0
        self._taken: dict[Block, float] = {}
        self._released: dict[Block, float] = {}
        self.lifetime, self.idle, self.reuse_gap = Ages(), Ages(), Ages()

    def take(self, blocks: Iterable[Block]) -> None:
        """These get other content from now on."""
        now = self._clock()
        for block in blocks:
            taken, released = self._taken.pop(block, None), self._released.pop(block, None)
            if taken is not None and released is not None:
                self.lifetime.add(now - taken)
                self.idle.add(now - released)
            self._count += 1
            if self._count % self._every == 0:
                self._taken[block] = now

    def hold(self, blocks: Iterable[Block]) -> None:
        """These were found in the cache."""
        now = self._clock()
        for block in blocks:
            if (released := self._released.pop(block, None)) is not None:
                self.reuse_gap.add(now - released)

    def release(self, blocks: Iterable[Block]) -> None:
        """Nobody holds these from now on."""
        now = self._clock()
        for block in blocks:
            if block in self._taken:
                self._released[block] = now

    def report(self) -> dict[str, dict[str, float]]:
        """The histograms, by name."""
        return {
            "block_lifetime_seconds": self.lifetime.report(),
            "block_idle_before_evict_seconds": self.idle.report(),
            "block_reuse_gap_seconds": self.reuse_gap.report(),
        }


def watch(
    pool: KVPool, every: int, clock: Callable[[], float] = time.monotonic
) -> BlockAges | None:
    """The ages of a pool's blocks, of every `every`-th; None of 0. They stand in place of its
    methods, so that a pool that nobody watches does nothing for it."""
    if not every:
        return None
    ages = BlockAges(every, clock)
    take, hold, release = pool.take, pool.hold, pool.release

    def watched_take(counts: Sequence[int]) -> list[list[int]]:
        taken = take(counts)
        ages.take((group, block) for group, blocks in enumerate(taken) for block in blocks)
        return taken

    def watched_hold(group: int, blocks: Sequence[int]) -> None:
        hold(group, blocks)
        ages.hold((group, block) for block in blocks)

    def watched_release(group: int, blocks: Sequence[int]) -> None:
        release(group, blocks)
        ages.release((group, block) for block in blocks if not pool.refs(group, block))

    vars(pool).update(take=watched_take, hold=watched_hold, release=watched_release)
    return ages
