"""The blocks of the KV cache: who holds how many references, which are free, and which still carry a hash.

A block that nobody holds is free. Free blocks without a hash are handed out first, the last freed first (its memory is
warm); then those with a hash, the least recently used first, and only then does the hash go: until a block is reused
its content can be found again (ENG-08). Knows nothing of requests or tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and never handed out.

    Invariants:
    - a block is free if and only if its reference count is 0, and is then in exactly one of the two free lists;
    - a hash stands for at most one block per group; a block carries at most one hash.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_usable = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int32)
        self._tagged = np.zeros(num_blocks, np.bool_)
        self._tags: dict[int, tuple[int, bytes]] = {}
        self._found: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._plain = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._plain) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        """References held on a block."""
        return int(self._refs[block])

    def refcount_sum(self) -> int:
        """All references held; 0 at rest."""
        return int(self._refs.sum())

    def find(self, group: int, digest: bytes) -> int | None:
        """The block of this group that holds this content."""
        return self._found[group].get(digest)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has seen that so many are free."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        plain = self._plain
        split = max(0, len(plain) - count)
        taken = plain[split:]
        del plain[split:]
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            self._untag(block)
            self.num_evictions += 1
            taken.append(block)
        self._refs[taken] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference on each of these found blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each (distinct) block. The first given are reused first, so give a sequence's tail
        first: its beginning is what others share."""
        if not blocks:
            return
        ids = np.asarray(blocks, np.int32)
        assert self._refs[ids].min() > 0, "a block was freed twice"
        self._refs[ids] -= 1
        freed = ids[self._refs[ids] == 0]
        tagged = self._tagged[freed]
        self._cached.update(dict.fromkeys(freed[tagged].tolist()))
        self._plain.extend(freed[~tagged].tolist())

    def tag(self, block: int, group: int, digest: bytes) -> None:
        """Lets a held block be found by its content. Content that another block already holds stays with that one."""
        found = self._found[group]
        if digest not in found and block not in self._tags:
            found[digest] = block
            self._tags[block] = (group, digest)
            self._tagged[block] = True

    def forget(self, block: int) -> None:
        """Takes the hash from a block, held or free."""
        if block not in self._tags:
            return
        self._untag(block)
        if self._refs[block] == 0:
            del self._cached[block]
            self._plain.append(block)

    def forget_all(self) -> None:
        """Takes every hash from every block."""
        for found in self._found:
            found.clear()
        self._tags.clear()
        self._tagged[:] = False
        self._plain.extend(self._cached)
        self._cached.clear()

    def _untag(self, block: int) -> None:
        group, digest = self._tags.pop(block)
        del self._found[group][digest]
        self._tagged[block] = False
