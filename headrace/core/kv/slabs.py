"""A pool for groups whose blocks have unequal bytes: memory is handed to groups a slab at a time.

A slab holds `blocks_per_slab[g]` blocks of group g, and all of its blocks belong to one group.
Block b of group g lies in slab b // blocks_per_slab[g], so that kernels find it by one stride and
the ids of different groups name overlapping memory: a slab's owner decides who may use it.

    unowned   nobody uses it
    active    some block of it is held; its other blocks can be taken by the same group alone
    idle      no block of it is held, but some can still be found by their hash

Any group may take an unowned or an idle slab; what an idle one remembered is then gone. So a set of
blocks fits exactly if, beyond the free blocks of each group's active slabs, there are enough slabs
that are not active. A group takes the free block with the lowest number, which empties the slabs
with higher ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

NOBODY = -1


class SlabPool:
    """`num_slabs` slabs, of which slab 0 is never handed out: it holds every group's null block.

    `trims[g]`: the group gives blocks back while a request runs. It reuses all blocks of its active
    slabs, also cached ones, before it takes another slab, so that a request alone never holds more
    than one slab beyond what its blocks fill.

    Invariants:
    - a slab has one owner while it is active or idle; a block is held only in an active slab;
    - `num_free_in[g]` counts the blocks in active slabs of g that are not held.
    """

    unit = "slabs"
    on_forgotten: Callable[[int, bytes], None] | None = None

    def __init__(
        self, num_slabs: int, blocks_per_slab: Sequence[int], trims: Sequence[bool]
    ) -> None:
        self.num_usable = num_slabs - 1
        self.num_evictions = 0
        self._per_slab = tuple(blocks_per_slab)
        self._trims = tuple(trims)
        groups = range(len(self._per_slab))
        self._owner = [NOBODY] * num_slabs
        self._num_held = [0] * num_slabs
        self._unowned = list(range(1, num_slabs))  # a heap
        self._idle: OrderedDict[int, int] = OrderedDict()  # slab -> when it became idle
        self.num_free_in = [0 for _ in groups]
        self._refs: list[dict[int, int]] = [{} for _ in groups]  # held blocks only
        self._plain: list[list[int]] = [[] for _ in groups]  # heaps; entries may be stale
        self._cached: list[OrderedDict[int, int]] = [
            OrderedDict() for _ in groups
        ]  # in active slabs
        self._tags: list[dict[int, bytes]] = [{} for _ in groups]
        self._by_digest: list[dict[bytes, int]] = [{} for _ in groups]
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Slabs that any group can take."""
        return len(self._unowned) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """See KVPool."""
        return sum(
            len(tags.keys() - refs.keys())
            for tags, refs in zip(self._tags, self._refs, strict=True)
        )

    def units(self, counts: Sequence[int]) -> int:
        """Slabs for so many blocks of each group; a group that trims may have one more in part."""
        return sum(
            -(-count // size) + (trims and size > 1 and count > 0)
            for count, size, trims in zip(counts, self._per_slab, self._trims, strict=True)
        )

    def fits(self, counts: Sequence[int], hits: Sequence[tuple[int, int]] = ()) -> bool:
        """See KVPool."""
        free_in, whole = list(self.num_free_in), self.num_free
        woken: set[int] = set()
        for group, block in dict.fromkeys(hits):
            if block in self._refs[group]:
                continue
            slab = block // self._per_slab[group]
            if slab in self._idle and slab not in woken:
                woken.add(slab)
                whole -= 1
                free_in[group] += self._per_slab[group]
            free_in[group] -= 1
        return self._num_slabs_for(counts, free_in) <= whole

    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """See KVPool. Slabs beyond those that are needed at all may be taken before cached blocks
        are given up, as long as every group gets what it asked for."""
        spare = self.num_free - self._num_slabs_for(counts, self.num_free_in)
        assert spare >= 0, (counts, self.num_free_in, self.num_free)
        taken: list[list[int]] = []
        for group, count in enumerate(counts):
            blocks: list[int] = []
            while len(blocks) < count:
                block = self._pop_plain(group)
                if block is None:
                    needed = count - len(blocks) > self.num_free_in[group]
                    if self._opens_slab(group, needed=needed, spare=spare):
                        spare -= not needed
                        self._open_slab(group)
                        block = self._pop_plain(group)
                    else:
                        block = self._evict(group)
                assert block is not None, (group, self.num_free_in)
                self._begin_hold(group, block)
                blocks.append(block)
            taken.append(blocks)
        return taken

    def refs(self, group: int, block: int) -> int:
        """See KVPool."""
        return self._refs[group].get(block, 0)

    def refcount_sum(self) -> int:
        """See KVPool."""
        return sum(sum(refs.values()) for refs in self._refs)

    def find(self, group: int, digest: bytes) -> int | None:
        """See KVPool."""
        return self._by_digest[group].get(digest)

    def hold(self, group: int, blocks: Sequence[int]) -> None:
        """See KVPool."""
        refs = self._refs[group]
        for block in blocks:
            if block in refs:
                refs[block] += 1
                continue
            slab = block // self._per_slab[group]
            if slab in self._idle:
                del self._idle[slab]
                self._activate(group, slab)
            del self._cached[group][block]
            self._begin_hold(group, block)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """See KVPool."""
        refs, tags = self._refs[group], self._tags[group]
        for block in blocks:
            assert block in refs, f"block {block} of group {group} was freed twice"
            refs[block] -= 1
            if refs[block]:
                continue
            del refs[block]
            slab = block // self._per_slab[group]
            self._num_held[slab] -= 1
            self.num_free_in[group] += 1
            self._clock += 1
            if block in tags:
                self._cached[group][block] = self._clock
            else:
                heapq.heappush(self._plain[group], block)
            if not self._num_held[slab]:
                self._deactivate(group, slab)

    def tag(self, group: int, block: int, digest: bytes) -> None:
        """See KVPool."""
        by_digest, tags = self._by_digest[group], self._tags[group]
        if digest not in by_digest and block not in tags:
            by_digest[digest] = block
            tags[block] = digest

    def forget(self, group: int, block: int) -> None:
        """See KVPool."""
        if block not in self._tags[group]:
            return
        self._untag(group, block)
        if block in self._refs[group]:
            return
        slab = block // self._per_slab[group]
        if slab in self._idle:
            self._disown_if_empty(group, slab)
        else:
            del self._cached[group][block]
            heapq.heappush(self._plain[group], block)

    def forget_all(self) -> None:
        """See KVPool."""
        for group, tags in enumerate(self._tags):
            for block in list(tags):
                self.forget(group, block)

    # slabs

    def _num_slabs_for(self, counts: Sequence[int], free_in: Sequence[int]) -> int:
        return sum(
            -(-max(0, count - free) // size)
            for count, free, size in zip(counts, free_in, self._per_slab, strict=True)
        )

    def _blocks_of(self, group: int, slab: int) -> range:
        size = self._per_slab[group]
        return range(slab * size, (slab + 1) * size)

    def _opens_slab(self, group: int, *, needed: bool, spare: int) -> bool:
        """Whether to take another slab, rather than the group's cached block that was used least
        recently."""
        cached = self._cached[group]
        if not cached:
            return True
        if self._trims[group] or not (needed or spare > 0):
            return False
        if self._unowned:
            return True
        _, became_idle = next(iter(self._idle.items()))
        _, released = next(iter(cached.items()))
        return became_idle < released

    def _open_slab(self, group: int) -> None:
        """Gives the group a slab, the one that was idle longest if none is unowned."""
        if self._unowned:
            slab = heapq.heappop(self._unowned)
        else:
            slab, _ = self._idle.popitem(last=False)
            owner = self._owner[slab]
            for block in self._blocks_of(owner, slab):
                if block in self._tags[owner]:
                    self._untag(owner, block)
                    self.num_evictions += 1
        self._owner[slab] = group
        self._activate(group, slab)

    def _activate(self, group: int, slab: int) -> None:
        """One of the slab's blocks is about to be held."""
        self.num_free_in[group] += self._per_slab[group]
        if len(self._plain[group]) > 2 * self.num_free_in[group] + 64:
            fresh = {block for block in self._plain[group] if self._is_plain(group, block)}
            self._plain[group] = sorted(fresh)
        for block in self._blocks_of(group, slab):
            if block in self._tags[group]:
                self._cached[group][block] = self._clock
            else:
                heapq.heappush(self._plain[group], block)

    def _deactivate(self, group: int, slab: int) -> None:
        """The slab's last held block was released."""
        self.num_free_in[group] -= self._per_slab[group]
        for block in self._blocks_of(group, slab):
            self._cached[group].pop(block, None)
        self._idle[slab] = self._clock
        self._disown_if_empty(group, slab)

    def _disown_if_empty(self, group: int, slab: int) -> None:
        """An idle slab that remembers nothing is anybody's."""
        if not any(block in self._tags[group] for block in self._blocks_of(group, slab)):
            del self._idle[slab]
            self._owner[slab] = NOBODY
            heapq.heappush(self._unowned, slab)

    # blocks

    def _pop_plain(self, group: int) -> int | None:
        """The lowest free block without a hash in the group's active slabs."""
        heap = self._plain[group]
        while heap:
            block = heapq.heappop(heap)
            if self._is_plain(group, block):
                return block
        return None

    def _is_plain(self, group: int, block: int) -> bool:
        """Whether an entry of the heap still holds: entries stay there when their slab is given up,
        or when the block is held or named by way of another entry."""
        slab = block // self._per_slab[group]
        active = self._owner[slab] == group and slab not in self._idle
        return active and block not in self._refs[group] and block not in self._tags[group]

    def _evict(self, group: int) -> int:
        block, _ = self._cached[group].popitem(last=False)
        self._untag(group, block)
        self.num_evictions += 1
        return block

    def _begin_hold(self, group: int, block: int) -> None:
        self._refs[group][block] = 1
        self._num_held[block // self._per_slab[group]] += 1
        self.num_free_in[group] -= 1

    def _untag(self, group: int, block: int) -> None:
        digest = self._tags[group].pop(block)
        del self._by_digest[group][digest]
        if self.on_forgotten is not None:
            self.on_forgotten(group, digest)
