"""Snapshots of recurrent state: copies of a row's state at the end of a block, from which another
request with the same prefix can begin.

Each recurrent group has a few slots for them. A slot is named in the group's block table at the
block's index: where a row's next position is the end of block i and entry i is not 0, the workers
load the state from there before the step; where a step ends with block i and entry i is not 0, they
save it there after the step. So an entry stays in the table for one step alone, while the slot is
held until its content is known to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace.base.wire.step import KVGroup
from headrace.core.kv.pool import NULL_BLOCK, BlockPool
from headrace.core.request import Request

Update = tuple[int, int, int]


class Snapshots:
    """The slots of all recurrent groups. False if there are none."""

    def __init__(self, groups: Sequence[KVGroup], *, block_tokens: int) -> None:
        self._block_tokens = block_tokens
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

    def chunk_tokens(self, *, start: int, want: int) -> int:
        """The part of a chunk that ends with a block, if it reaches the end of one."""
        aligned = (start + want) // self._block_tokens * self._block_tokens
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
        if that is inside a block or all slots are held."""
        index, inside = divmod(tokens, self._block_tokens)
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
