"""The blocks of a prefix, held while the workers copy them away, or taken for a prefix that comes
back: all that a request needs to go on behind it, in every group of caches."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import Conflict, InvalidRequest
from headrace.core.kv.manager import KVManager
from headrace.core.kv.pool import KVPool
from headrace.core.request import Request

Places = tuple[tuple[int, ...], ...]
"""Of each group the numbers of blocks within the sequence (of recurrent state: behind which block
of the hash chain)."""


def places_of(kv: KVManager, hit: int) -> Places:
    """Those that a hit of `hit` blocks of the hash chain makes use of."""
    places: list[tuple[int, ...]] = []
    for kind, ratio in zip(kv.kinds, kv.ratios, strict=True):
        size = hit // ratio if kind.shares else 0
        places.append(tuple(range(kind.hit_start(size), size)))
    return tuple(places)


def pool_of(kv: KVManager, group: int) -> tuple[KVPool, int]:
    """The pool of a group's blocks, or of the snapshots of its state, and its number there."""
    return (kv.snapshots.pool(group), 0) if group in kv.snapshots else (kv.pool, group)


@dataclass(eq=False)
class PrefixCopy:
    """Blocks with one reference each: `blocks` of each group, in the order of `places`.

    Exactly one of `release` and `adopt` is called, once."""

    kv: KVManager
    request: Request
    hit: int
    places: Places
    blocks: Places

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV this is."""
        return self.hit * self.kv.block_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes on one rank."""
        sizes = zip(self.kv.groups, self.blocks, strict=True)
        return sum(group.block_bytes * len(blocks) for group, blocks in sizes)

    def release(self, *, forget: bool = False) -> None:
        """Lets go of the blocks; with `forget` nothing of them can be found again."""
        for group, blocks in enumerate(self.blocks):
            pool, index = pool_of(self.kv, group)
            for block in blocks if forget else ():
                pool.forget(index, block)
            pool.release(index, blocks[::-1])

    def adopt(self) -> None:
        """The content is there: from now on it can be found, until somebody needs the room."""
        for group, (places, blocks) in enumerate(zip(self.places, self.blocks, strict=True)):
            pool, index = pool_of(self.kv, group)
            for place, block in zip(places, blocks, strict=True):
                last = (place + 1) * self.kv.ratios[group] - 1
                pool.tag(index, block, self.kv.digest(self.request, last))
        self.release()


def hold(kv: KVManager, request: Request) -> PrefixCopy | None:
    """What is cached of the request's tokens; None where nothing is."""
    hit = kv.match(request)
    if not hit:
        return None
    places = places_of(kv, hit)
    held: list[tuple[int, ...]] = []
    for group, wanted in enumerate(places):
        pool, index = pool_of(kv, group)
        ratio, blocks = kv.ratios[group], list[int]()
        for place in wanted:
            block = pool.find(index, kv.digest(request, (place + 1) * ratio - 1))
            assert block is not None, (group, place)
            blocks.append(block)
        pool.hold(index, blocks)
        held.append(tuple(blocks))
    return PrefixCopy(kv, request, hit, places, tuple(held))


def take(kv: KVManager, request: Request, hit: int, places: Places) -> PrefixCopy:
    """Room for the request's first `hit` blocks of the hash chain; Conflict where there is none
    beside what runs."""
    kv.match(request)  # begins the hash chain
    if places != places_of(kv, hit):
        raise InvalidRequest(
            "filename: the blocks in the file are not those of its tokens", field="filename"
        )
    states = set(kv.snapshots)
    counts = [0 if group in states else len(wanted) for group, wanted in enumerate(places)]
    free_states = all(pool_of(kv, group)[0].fits([1]) for group in states)
    if not kv.pool.fits(counts) or not free_states:
        raise Conflict(
            f"filename: its {hit * kv.block_tokens} tokens need {kv.pool.units(counts)} KV {kv.pool.unit}"
            f"{' and the slot of a snapshot' if states else ''}, {kv.pool.num_free} are free beside what "
            "runs; try again later"
        )
    taken = kv.pool.take(counts)
    for group in states:
        taken[group] = pool_of(kv, group)[0].take([len(places[group])])[0]
    return PrefixCopy(kv, request, hit, places, tuple(map(tuple, taken)))
