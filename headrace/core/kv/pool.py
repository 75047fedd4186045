"""The blocks of the KV cache: who holds how many references, which are free, and which still carry
a hash; and the slots for snapshots of recurrent state, which are numbered from pools of their own.

A block that nobody holds is free. Free blocks without a hash are handed out first, the last freed
first (its memory is warm); then those with a hash, the least recently used first, and only then
does the hash go: until a block is reused its content can be found again. A pool knows nothing of
requests or tokens.

`BlockPool` is for groups whose blocks have equal bytes: every free block serves every group. Groups
of unequal blocks share a pool of slabs (slabs.py).

The content of a block is named by a keyed cryptographic hash chain over everything it depends on:

    start   = H(tenant, cache salt, extra keys)          each with its length in front: no two lists
            look alike
    block i = H(block i-1, token ids of block i)         the raw little-endian bytes

H is BLAKE2b keyed with a secret of this process: nobody can construct two prompts that collide, nor
learn anything from a hash, and a hash of another process or tenant means nothing here.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from headrace.base.wire.step import KVGroup
from headrace.core.request import Request

NULL_BLOCK = 0


class KVPool(Protocol):
    """What the manager asks of a pool. Blocks are numbered by group; sizes and free counts are in
    the pool's own unit: blocks, or slabs where groups have unequal ones."""

    unit: str
    num_usable: int
    num_evictions: int
    on_forgotten: Callable[[int, bytes], None] | None
    """Is told the group and the content that cannot be found any more, but by `forget_all`."""

    @property
    def num_free(self) -> int:
        """Units of which nobody holds anything."""
        ...

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        ...

    def units(self, counts: Sequence[int]) -> int:
        """Units that so many blocks of each group take at least."""
        ...

    def fits(self, counts: Sequence[int], hits: Sequence[tuple[int, int]] = ()) -> bool:
        """Whether so many blocks of each group can be taken once these cached blocks
        (group, block) are held."""
        ...

    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """So many blocks of each group, with one reference each; the caller has asked `fits`."""
        ...

    def refs(self, group: int, block: int) -> int:
        """References held on a block."""
        ...

    def refcount_sum(self) -> int:
        """All references held; 0 at rest."""
        ...

    def find(self, group: int, digest: bytes) -> int | None:
        """The block of this group that holds this content."""
        ...

    def hold(self, group: int, blocks: Sequence[int]) -> None:
        """One more reference on each of these blocks, which were found."""
        ...

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """One reference less on each (distinct) block. The first ones are reused first, so give a
        sequence's tail first: its beginning is what others share."""
        ...

    def tag(self, group: int, block: int, digest: bytes) -> None:
        """Lets a held block be found by its content. Content that another block already holds stays
        with that one."""
        ...

    def forget(self, group: int, block: int) -> None:
        """Takes the hash from a block, held or free."""
        ...

    def forget_all(self) -> None:
        """Takes every hash from every block."""
        ...


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and never handed out.

    Invariants:
    - a block is free if and only if its reference count is 0, and is then in exactly one of the two
      free lists;
    - a hash stands for at most one block per group; a block carries at most one hash.
    """

    unit = "blocks"
    on_forgotten: Callable[[int, bytes], None] | None = None

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_usable = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int32)
        self._tagged = np.zeros(num_blocks, np.bool_)
        self._tags: dict[int, tuple[int, bytes]] = {}
        self._by_digest: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._plain = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._plain) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """See KVPool."""
        return len(self._cached)

    def units(self, counts: Sequence[int]) -> int:
        """See KVPool."""
        return sum(counts)

    def fits(self, counts: Sequence[int], hits: Sequence[tuple[int, int]] = ()) -> bool:
        """See KVPool."""
        free_hits = sum(self.refs(group, block) == 0 for group, block in hits)
        return sum(counts) + free_hits <= self.num_free

    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """See KVPool."""
        if len(counts) == 1:
            return [self._take(counts[0])]
        return [self._take(count) for count in counts]

    def _take(self, count: int) -> list[int]:
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

    def refs(self, group: int, block: int) -> int:
        """See KVPool."""
        return int(self._refs[block])

    def refcount_sum(self) -> int:
        """See KVPool."""
        return int(self._refs.sum())

    def find(self, group: int, digest: bytes) -> int | None:
        """See KVPool."""
        return self._by_digest[group].get(digest)

    def hold(self, group: int, blocks: Sequence[int]) -> None:
        """See KVPool."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """See KVPool."""
        if not blocks:
            return
        ids = np.asarray(blocks, np.int32)
        assert self._refs[ids].min() > 0, "a block was freed twice"
        self._refs[ids] -= 1
        freed = ids[self._refs[ids] == 0]
        tagged = self._tagged[freed]
        self._cached.update(dict.fromkeys(freed[tagged].tolist()))
        self._plain.extend(freed[~tagged].tolist())

    def tag(self, group: int, block: int, digest: bytes) -> None:
        """See KVPool."""
        by_digest = self._by_digest[group]
        if digest not in by_digest and block not in self._tags:
            by_digest[digest] = block
            self._tags[block] = (group, digest)
            self._tagged[block] = True

    def forget(self, group: int, block: int) -> None:
        """See KVPool."""
        if block not in self._tags:
            return
        self._untag(block)
        if self._refs[block] == 0:
            del self._cached[block]
            self._plain.append(block)

    def forget_all(self) -> None:
        """See KVPool."""
        for by_digest in self._by_digest:
            by_digest.clear()
        self._tags.clear()
        self._tagged[:] = False
        self._plain.extend(self._cached)
        self._cached.clear()

    def _untag(self, block: int) -> None:
        group, digest = self._tags.pop(block)
        del self._by_digest[group][digest]
        self._tagged[block] = False
        if self.on_forgotten is not None:
            self.on_forgotten(group, digest)


DIGEST_BYTES = 16


class PrefixHasher:
    """Makes the hashes of one engine core."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._keyed = blake2b(digest_size=DIGEST_BYTES, key=self._key)

    def start(self, *, tenant: str, salt: str, extra_keys: Iterable[bytes]) -> bytes:
        """The chain's start: prompts share blocks only if they agree in all of this."""
        parts = [tenant.encode(), salt.encode(), *extra_keys]
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake2b(framed, digest_size=DIGEST_BYTES, key=self._key).digest()

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """The hash of the block with these tokens behind `parent`."""
        digest = self._keyed.copy()  # a third faster than one made anew
        digest.update(parent + token_bytes)
        return digest.digest()


Update = tuple[int, int, int]


class Snapshots:
    """Copies of a row's recurrent state at the end of a block, from which another request with the
    same prefix can begin: the slots of all recurrent groups. False if there are none.

    A slot is named in the group's block table at the block's index: where a row's next position is
    the end of block i and entry i is not 0, the workers load the state from there before the step;
    where a step ends with block i and entry i is not 0, they save it there after the step. So an
    entry stays in the table for one step alone, while the slot is held until its content is known
    to be there. `every`: only at the ends of so many blocks.
    """

    def __init__(self, groups: Sequence[KVGroup], block_tokens: int, *, every: int = 1) -> None:
        self._block_tokens, self._step = block_tokens, block_tokens * every
        self._pools = {
            index: BlockPool(max(1, group.num_slots), 1)
            for index, group in enumerate(groups)
            if group.kind == "state"
        }

    def __bool__(self) -> bool:
        return bool(self._pools)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pools)

    def __contains__(self, group: int) -> bool:
        return group in self._pools

    @property
    def num_held(self) -> int:
        """References held on slots; 0 at rest."""
        return sum(pool.refcount_sum() for pool in self._pools.values())

    @property
    def num_usable(self) -> int:
        """Slots of all groups."""
        return sum(pool.num_usable for pool in self._pools.values())

    @property
    def num_cached(self) -> int:
        """Slots whose content a request could begin behind."""
        return sum(pool.num_cached for pool in self._pools.values())

    def pool(self, group: int) -> BlockPool:
        """The slots of a group."""
        return self._pools[group]

    def chunk_tokens(self, *, start: int, want: int) -> int:
        """The part of a chunk that ends where state is kept, if it reaches such a place."""
        aligned = (start + want) // self._step * self._step
        keeps = all(pool.num_usable for pool in self._pools.values())
        return aligned - start if keeps and aligned > start else want

    def find(self, group: int, digest: bytes) -> int | None:
        """The slot that holds the state behind this content."""
        return self._pools[group].find(0, digest)

    def attach(self, request: Request, index: int, digest: bytes) -> list[Update]:
        """The request begins behind block `index`, of which every group has a snapshot."""
        updates: list[Update] = []
        for group, pool in self._pools.items():
            slot = pool.find(0, digest)
            assert slot is not None, (group, index)
            pool.hold(0, (slot,))
            updates.append((group, index, slot))
        self._note(request, updates)
        return updates

    def take(self, request: Request, tokens: int) -> list[Update]:
        """Slots for the state behind the first `tokens` tokens, which end the step's chunk; none
        where no state is kept, or all slots are held."""
        index, inside = tokens // self._block_tokens, tokens % self._step
        free = all(pool.num_free for pool in self._pools.values())
        if inside or not free:
            return []
        updates = [(g, index - 1, pool.take([1])[0][0]) for g, pool in self._pools.items()]
        self._note(request, updates)
        return updates

    def detach(self, request: Request) -> list[Update]:
        """Empties the entries of steps that are planned: the row's own state goes on."""
        updates = [(group, index, NULL_BLOCK) for group, index in request.snapshot_entries]
        request.snapshot_entries.clear()
        return updates

    def register(self, request: Request, last: int, digest: Callable[[int], bytes]) -> None:
        """Names and lets go of the snapshots below block `last`, whose content is there by now."""
        kept: list[Update] = []
        for group, index, slot in request.snapshots:
            if index >= last:
                kept.append((group, index, slot))
                continue
            if request.registers:
                self._pools[group].tag(0, slot, digest(index))
            self._pools[group].release(0, [slot])
        request.snapshots = kept

    def release(self, request: Request, *, forget: bool) -> None:
        """Lets go of all the request's snapshots."""
        for group, _, slot in request.snapshots:
            if forget:
                self._pools[group].forget(0, slot)
            self._pools[group].release(0, [slot])
        request.snapshots.clear()
        request.snapshot_entries.clear()

    def forget_all(self) -> None:
        """Takes every hash from every slot."""
        for pool in self._pools.values():
            pool.forget_all()

    def _note(self, request: Request, updates: list[Update]) -> None:
        request.snapshots += updates
        request.snapshot_entries += [(group, index) for group, index, _ in updates]
