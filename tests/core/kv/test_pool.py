"""ENG-08, P18: who holds a block, and what is reused first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.kv.pool import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    """That many blocks for group 0."""
    return pool.take([count])[0]


def named(pool: BlockPool, count: int) -> list[int]:
    """Blocks that carry the hashes b"0", b"1", ..., free again, released in this order."""
    blocks = take(pool, count)
    for i, block in enumerate(blocks):
        pool.tag(0, block, str(i).encode())
    pool.release(0, blocks)
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(10, 1)
    assert pool.num_usable == pool.num_free == 9
    assert sorted(take(pool, 9)) == list(range(1, 10))


def test_freed_block_keeps_its_hash_until_reused() -> None:
    pool = BlockPool(4, 1)
    blocks = named(pool, 3)
    assert pool.find(0, b"1") == blocks[1]
    assert take(pool, 1) == [blocks[0]]
    assert pool.find(0, b"0") is None and pool.find(0, b"1") == blocks[1]
    assert pool.num_evictions == 1


def test_blocks_without_a_hash_are_reused_first() -> None:
    """REG-012."""
    pool = BlockPool(6, 1)
    kept = named(pool, 3)
    plain = take(pool, 2)
    assert not set(plain) & set(kept)
    pool.release(0, plain)
    assert set(take(pool, 2)) == set(plain)
    assert [pool.find(0, str(i).encode()) for i in range(3)] == kept


def test_the_least_recently_used_hash_goes_first() -> None:
    pool = BlockPool(4, 1)
    blocks = named(pool, 3)
    pool.hold(0, [blocks[0]])
    pool.release(0, [blocks[0]])
    assert take(pool, 2) == [blocks[1], blocks[2]]
    assert pool.find(0, b"0") == blocks[0]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, 1)
    blocks = named(pool, 1)
    pool.hold(0, blocks)
    pool.hold(0, blocks)
    pool.release(0, blocks)
    assert pool.refs(0, blocks[0]) == 1 and pool.num_free == 2
    pool.release(0, blocks)
    assert pool.num_free == 3


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(4, 1)
    blocks = take(pool, 1)
    pool.release(0, blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(0, blocks)


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(4, 2)
    block = take(pool, 1)[0]
    pool.tag(1, block, b"x")
    assert pool.find(0, b"x") is None and pool.find(1, b"x") == block


def test_forget_all_keeps_the_holders() -> None:
    pool = BlockPool(6, 1)
    held = take(pool, 2)
    pool.tag(0, held[0], b"held")
    named(pool, 2)
    pool.forget_all()
    assert pool.find(0, b"held") is None and pool.num_cached == 0
    assert pool.num_free == 3 and pool.refcount_sum() == 2


class PoolLife(RuleBasedStateMachine):
    """A pool beside the plainest model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.refs: dict[int, int] = {}
        self.names: dict[tuple[int, bytes], int] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        plain = self.pool.num_free - self.pool.num_cached
        for i, block in enumerate(take(self.pool, count)):
            assert block not in self.refs and block != 0
            self.refs[block] = 1
            named = [key for key, holder in self.names.items() if holder == block]
            assert bool(named) == (i >= plain), "a hash was lost while plain blocks were free"
            for key in named:
                del self.names[key]

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.release(0, blocks)
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = self.names[data.draw(st.sampled_from(sorted(self.names)))]
        self.pool.hold(0, [block])
        self.refs[block] = self.refs.get(block, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), group=st.integers(0, 1), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def tag(self, data: st.DataObject, group: int, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.tag(group, block, name)
        if (group, name) not in self.names and block not in self.names.values():
            self.names[group, name] = block

    @rule(block=st.integers(1, 11))
    def forget(self, block: int) -> None:
        self.pool.forget(0, block)
        self.names = {key: holder for key, holder in self.names.items() if holder != block}

    @invariant()
    def agrees(self) -> None:
        assert {b: self.pool.refs(0, b) for b in range(12) if self.pool.refs(0, b)} == self.refs
        assert self.pool.num_free == 11 - len(self.refs)
        assert self.pool.refcount_sum() == sum(self.refs.values())
        for group in (0, 1):
            for name in (b"a", b"b", b"c", b"d"):
                assert self.pool.find(group, name) == self.names.get((group, name))
        assert self.pool.num_cached == sum(b not in self.refs for b in self.names.values())


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
