"""P18: groups of unequal blocks in one pool: who owns which bytes, and what can always be taken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.kv.slabs import SlabPool

Held = dict[tuple[int, int], int]


def assert_no_byte_has_two_owners(held: Held, per_slab: tuple[int, ...], num_slabs: int) -> None:
    """Blocks as ranges of a slab cut into as many parts as all groups need."""
    owners: dict[int, int] = {}
    for group, block in held:
        slab = block // per_slab[group]
        assert 0 < slab < num_slabs, (group, block)
        assert owners.setdefault(slab, group) == group, f"slab {slab} has two owners"


def test_a_slab_serves_one_group_at_a_time() -> None:
    pool = SlabPool(4, (1, 4), (False, False))
    full, small = pool.take([1, 5])
    assert full == [1] and small == [8, 9, 10, 11, 12]
    assert pool.num_free == 0 and not pool.fits([1, 0]) and pool.fits([0, 3])
    pool.release(1, small[:4])
    assert pool.num_free == 1 and pool.fits([1, 3])


def test_an_idle_slab_remembers_until_another_group_takes_it() -> None:
    pool = SlabPool(2, (1, 2), (False, False))
    _, (first, second) = pool.take([0, 2])
    pool.tag(1, first, b"x")
    pool.release(1, [second, first])
    assert pool.num_free == 1 and pool.num_cached == 1
    assert pool.find(1, b"x") == first
    pool.hold(1, [first])
    assert pool.num_free == 0 and pool.fits([0, 1])
    pool.release(1, [first])
    assert pool.take([1, 0])[0] == [1]
    assert pool.find(1, b"x") is None and pool.num_evictions == 1


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    pool = SlabPool(3, (2, 1), (False, False))
    (a, b, c, d), _ = pool.take([4, 0])
    for name, block in (("a", a), ("b", b), ("c", c), ("d", d)):
        pool.tag(0, block, name.encode())
    pool.release(0, [c, d])  # slab 2 is idle
    pool.release(0, [b])
    assert pool.take([1, 0])[0] == [c]
    assert pool.find(0, b"d") is None and pool.find(0, b"b") == b


def test_a_group_that_trims_reuses_its_own_slabs_before_it_takes_others() -> None:
    pool = SlabPool(9, (1, 4), (False, True))
    _, blocks = pool.take([0, 4])
    for i, block in enumerate(blocks):
        pool.tag(1, block, bytes([i]))
    pool.release(1, blocks[:3])
    assert pool.take([0, 3])[1] == blocks[:3]
    assert pool.num_free == 7


def test_freeing_twice_is_noticed() -> None:
    pool = SlabPool(3, (1, 2), (False, False))
    (block,), _ = pool.take([1, 0])
    pool.release(0, [block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(0, [block])


def test_waking_and_sleeping_slabs_leave_nothing_behind() -> None:
    pool = SlabPool(2, (1, 64), (False, False))
    _, blocks = pool.take([0, 2])
    pool.tag(1, blocks[0], b"x")
    pool.release(1, blocks)
    for _ in range(1000):
        pool.hold(1, blocks[:1])
        pool.release(1, blocks[:1])
    assert len(pool._plain[1]) < 400


@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_what_fits_is_what_can_be_taken(per_slab: list[int], data: st.DataObject) -> None:
    """`fits` against the plain count of slabs after random takes and releases."""
    pool = SlabPool(9, per_slab, [False] * len(per_slab))
    held = [
        pool.take([data.draw(st.integers(0, 3)) if g == i else 0 for i in range(len(per_slab))])[g]
        for g in range(len(per_slab))
        if pool.fits([3 if g == i else 0 for i in range(len(per_slab))])
    ]
    for group, blocks in enumerate(held):
        gone = data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []
        pool.release(group, gone)
        held[group] = [block for block in blocks if block not in gone]
    used = {(g, b // per_slab[g]) for g, blocks in enumerate(held) for b in blocks}
    room = [
        sum(g == owner for owner, _ in used) * per_slab[g] - (len(held[g]) if g < len(held) else 0)
        for g in range(len(per_slab))
    ]
    for counts in itertools.product(range(0, 14, 4), repeat=len(per_slab)):
        slabs = sum(
            -(-max(0, n - free) // k) for n, free, k in zip(counts, room, per_slab, strict=True)
        )
        assert pool.fits(counts) == (slabs <= 8 - len(used)), (counts, room, used)


class SlabLife(RuleBasedStateMachine):
    """A pool beside the plainest model of it: who holds what, and what carries which name."""

    @initialize(
        per_slab=st.lists(st.integers(1, 6), min_size=2, max_size=3),
        trims=st.lists(st.booleans(), min_size=3, max_size=3),
        num_slabs=st.integers(2, 8),
    )
    def begin(self, per_slab: list[int], trims: list[bool], num_slabs: int) -> None:
        self.per_slab, self.num_slabs = tuple(per_slab), num_slabs
        self.pool = SlabPool(num_slabs, per_slab, trims[: len(per_slab)])
        self.refs: Held = {}
        self.names: dict[tuple[int, bytes], int] = {}

    def active(self) -> set[int]:
        return {block // self.per_slab[group] for group, block in self.refs}

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        counts = [data.draw(st.integers(0, 7)) for _ in self.per_slab]
        if not self.pool.fits(counts):
            return
        taken = self.pool.take(counts)
        assert [len(blocks) for blocks in taken] == counts
        for group, blocks in enumerate(taken):
            for block in blocks:
                assert (group, block) not in self.refs
                self.refs[group, block] = 1
        taken_slabs = self.active()
        self.names = {
            (g, name): block
            for (g, name), block in self.names.items()
            if self.pool.find(g, name) == block or not self._may_be_forgotten(g, block, taken_slabs)
        }

    def _may_be_forgotten(self, group: int, block: int, active: set[int]) -> bool:
        """A name goes only with its block, or with its slab."""
        return (group, block) in self.refs or block // self.per_slab[group] in active

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        for group, block in gone:
            self.pool.release(group, [block])
            self.refs[group, block] -= 1
            if not self.refs[group, block]:
                del self.refs[group, block]

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        group, name = data.draw(st.sampled_from(sorted(self.names)))
        block = self.names[group, name]
        counts = [data.draw(st.integers(0, 4)) for _ in self.per_slab]
        fits = self.pool.fits(counts, [(group, block)])
        self.pool.hold(group, [block])
        self.refs[group, block] = self.refs.get((group, block), 0) + 1
        assert self.pool.fits(counts) == fits, "fits foresees what holding a hit leaves"

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def tag(self, data: st.DataObject, name: bytes) -> None:
        group, block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.tag(group, block, name)
        holders = {(g, held) for (g, _), held in self.names.items()}
        if (group, name) not in self.names and (group, block) not in holders:
            self.names[group, name] = block

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        group, name = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.forget(group, self.names.pop((group, name)))

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert_no_byte_has_two_owners(self.refs, self.per_slab, self.num_slabs)
        for (group, block), count in self.refs.items():
            assert self.pool.refs(group, block) == count
        assert self.pool.refcount_sum() == sum(self.refs.values())
        assert self.pool.num_free == self.num_slabs - 1 - len(self.active())
        for group in range(len(self.per_slab)):
            for name in (b"a", b"b", b"c", b"d"):
                assert self.pool.find(group, name) == self.names.get((group, name))
        free_named = sum((g, block) not in self.refs for (g, _), block in self.names.items())
        assert self.pool.num_cached == free_named


TestSlabLife = SlabLife.TestCase
TestSlabLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
