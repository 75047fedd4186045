"""Which cached block goes first, where it is not simply the least recently used one: the least
frequently used, or the one that its request gave the lowest priority (`--kv-eviction`,
`kv_retention` of a request).

The rank of a free block is (priority, uses, when it was freed); the lowest goes first. A priority
lasts as long as the content of its block, or until its time is over.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from headrace.base.config.kv_options import CacheChoices
from headrace.base.errors import ConfigError
from headrace.base.wire.retention import DEFAULT_PRIORITY
from headrace.base.wire.step import WorkerFacts
from headrace.core.kv.pool import BlockPool, KVPool
from headrace.core.kv.slabs import SlabPool

Rank = tuple[int, int]


class RankedBlocks:
    """Free blocks that can still be found, in the order in which they go: by the rank that they had
    when they were freed, then the first freed. Takes the place of the pool's OrderedDict."""

    def __init__(self, rank: Callable[[int], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, int, int]] = []
        self._entries: dict[int, tuple[int, int]] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __delitem__(self, block: int) -> None:
        del self._entries[block]

    def update(self, blocks: Iterable[int]) -> None:
        """These are free from now on."""
        for block in blocks:
            self._clock += 1
            self._push(block, self._clock)

    def renew(self, block: int) -> None:
        """The rank of a free block has changed; it keeps its place among those of its rank."""
        freed_at, _ = self._entries[block]
        self._push(block, freed_at)

    def popitem(self, last: bool = True) -> tuple[int, None]:
        """The block that goes first. KeyError if there is none."""
        assert not last
        while self._heap:
            _, freed_at, number, block = heapq.heappop(self._heap)
            if self._entries.get(block) == (freed_at, number):
                del self._entries[block]
                return block, None
        raise KeyError("no block is free")

    def clear(self) -> None:
        """Forgets all of them."""
        self._heap.clear()
        self._entries.clear()

    def _push(self, block: int, freed_at: int) -> None:
        self._clock += 1
        self._entries[block] = freed_at, self._clock
        heapq.heappush(self._heap, (self._rank(block), freed_at, self._clock, block))
        if len(self._heap) > 2 * len(self._entries) + 64:
            alive = [e for e in self._heap if self._entries.get(e[3]) == (e[1], e[2])]
            heapq.heapify(alive)
            self._heap = alive


class RankedBlockPool(BlockPool):
    """Blocks of equal bytes that go by priority and, where `counts_uses`, by how often they were
    found. `clock`: seconds, for priorities that end."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        *,
        counts_uses: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_blocks, num_groups)
        self._uses: dict[int, int] = {}
        self._priority: dict[int, int] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._until: dict[int, float] = {}
        self._counts_uses, self._clock = counts_uses, clock
        self._ranked = RankedBlocks(self._rank_of)
        self._cached = cast("OrderedDict[int, None]", self._ranked)

    def _rank_of(self, block: int) -> Rank:
        return self._priority.get(block, DEFAULT_PRIORITY), self._uses.get(block, 0)

    def hold(self, group: int, blocks: Iterable[int]) -> None:
        """See KVPool."""
        hits = tuple(blocks)
        if self._counts_uses:
            for block in hits:
                self._uses[block] = self._uses.get(block, 0) + 1
        super().hold(group, hits)

    def retain(self, block: int, priority: int, seconds: float | None) -> None:
        """Gives the content of a named block a priority, for so long (None: as long as it lasts).
        Of two requests the higher one counts."""
        if block not in self._tags or priority < self._priority.get(block, 0):
            return
        self._priority[block] = priority
        self._until.pop(block, None)
        if seconds is not None:
            until = self._until[block] = self._clock() + seconds
            heapq.heappush(self._ends, (until, block, priority))
        if block in self._ranked:
            self._ranked.renew(block)

    def priority(self, block: int) -> int:
        """The priority of a block's content now."""
        self._end_priorities()
        return self._priority.get(block, DEFAULT_PRIORITY)

    def forget_all(self) -> None:
        """See KVPool."""
        super().forget_all()
        for each in (self._uses, self._priority, self._until):
            each.clear()
        self._ends.clear()

    def _take(self, count: int) -> list[int]:
        if self._ends:
            self._end_priorities()
        return super()._take(count)

    def _end_priorities(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            until, block, _ = heapq.heappop(self._ends)
            if self._until.get(block) == until:
                del self._until[block], self._priority[block]
                if block in self._ranked:
                    self._ranked.renew(block)

    def _untag(self, block: int) -> None:
        super()._untag(block)
        for each in (self._uses, self._priority, self._until):
            each.pop(block, None)


def pool_of(facts: WorkerFacts, trims: list[bool], choices: CacheChoices) -> KVPool:
    """The pool of blocks; of slabs, where a slab holds several blocks of some group. ConfigError
    where slabs cannot go in the order that is wanted."""
    per_slab = [group.blocks_per_slab for group in facts.groups]
    is_plain = choices.eviction == "lru" and not choices.retention
    if all(size == 1 for size in per_slab):
        if is_plain:
            return BlockPool(facts.num_blocks, len(per_slab))
        uses = choices.eviction == "lfu"
        return RankedBlockPool(facts.num_blocks, len(per_slab), counts_uses=uses)
    if is_plain:
        return SlabPool(facts.num_blocks, per_slab, trims)
    field = "kv_retention" if choices.retention else "kv_eviction"
    raise ConfigError(
        f"--{field.replace('_', '-')}: the caches of this model have blocks of unequal bytes, which share slabs: "
        "whole slabs go, the least recently used first",
        field=field,
    )
