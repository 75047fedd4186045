"""Which cached block goes first, and how blocks are named: the choices of `--kv-eviction`, `kv_retention`
and `--prefix-hash`."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace

import msgspec
import pytest

from headrace.base.config.kv_options import CacheChoices
from headrace.base.errors import ConfigError, InvalidRequest, Unsupported
from headrace.base.optional import available
from headrace.base.wire.retention import (
    RETENTION,
    EngineHints,
    KVRetention,
    unpack_retention,
)
from headrace.base.wire.step import KVGroup
from headrace.core.kv.eviction import RankedBlockPool, pool_of
from headrace.core.kv.hashing import HASHERS, cbor, check_hash
from headrace.core.kv.pool import Snapshots
from headrace.core.kv_retention import KVRetentions
from headrace.core.request import Request
from tests.core.harness import Clock, Driver, make_request, make_spec
from tests.core.kv.test_kinds import facts_of


def cached(pool: RankedBlockPool, count: int) -> list[int]:
    """So many free blocks that can be found, the first freed first."""
    [blocks] = pool.take([count])
    for block in blocks:
        pool.tag(0, block, bytes([block]))
        pool.release(0, [block])
    return blocks


def order(pool: RankedBlockPool) -> list[int]:
    """All blocks as they go."""
    return [pool.take([1])[0][0] for _ in range(pool.num_free)]


def test_the_least_frequently_found_block_goes_first() -> None:
    """BEY-40: lfu; among equals the one freed first."""
    pool = RankedBlockPool(5, 1, counts_uses=True)
    a, b, c, d = cached(pool, 4)
    for block in (a, a, c):
        pool.hold(0, [block])
        pool.release(0, [block])
    assert order(pool) == [b, d, c, a]
    assert pool.num_evictions == 4 and pool.find(0, bytes([a])) is None


def test_uses_are_those_of_the_content_and_not_of_the_block() -> None:
    pool = RankedBlockPool(3, 1, counts_uses=True)
    a, b = cached(pool, 2)
    pool.hold(0, [a])
    pool.release(0, [a])
    assert order(pool) == [b, a]
    pool.release(0, [a, b])
    assert sorted(cached(pool, 2)) == sorted([a, b])
    first = order(pool)
    assert first == sorted(first, key=first.index) and pool.num_free == 0


def test_priorities_come_before_all_and_end_with_their_time() -> None:
    """BEY-41."""
    clock = Clock()
    pool = RankedBlockPool(5, 1, counts_uses=False, clock=clock)
    a, b, c, d = cached(pool, 4)
    pool.retain(a, 90, None)
    pool.retain(b, 80, 10.0)
    pool.retain(c, 10, None)
    pool.retain(a, 50, None)
    assert [pool.priority(block) for block in (a, b, c, d)] == [90, 80, 10, 35]
    clock.now += 10
    assert pool.priority(b) == 35
    assert order(pool) == [c, b, d, a]


def test_what_is_forgotten_loses_its_priority() -> None:
    pool = RankedBlockPool(3, 1, counts_uses=True)
    a, b = cached(pool, 2)
    pool.retain(a, 90, 5.0)
    pool.forget(0, a)
    assert pool.priority(a) == 35 and pool.num_cached == 1
    pool.retain(a, 90, None)
    assert pool.priority(a) == 35, "it has no content that could be found"
    pool.forget_all()
    assert pool.num_cached == 0 and sorted(order(pool)) == sorted([a, b])


def test_many_renewals_do_not_grow_the_heap() -> None:
    pool = RankedBlockPool(3, 1, counts_uses=False)
    a, _ = cached(pool, 2)
    for number in range(1000):
        pool.retain(a, 36 + number % 60 + number // 60, None)
    assert len(pool._ranked._heap) < 200


def test_a_request_s_priorities_keep_its_blocks() -> None:
    """BEY-41: through a core; the range's last block in part counts, another prompt evicts the rest."""
    spec = make_spec(num_blocks=13, block_tokens=4, max_step_tokens=64)
    spec = msgspec.structs.replace(
        spec, kv=msgspec.structs.replace(spec.kv, choices=CacheChoices(retention=True))
    )
    driver = Driver(spec, hooks=[hook := KVRetentions(lambda: driver.core)])
    prompt = list(range(3, 24))
    hints = EngineHints(retention=(KVRetention(start=0, end=10, priority=80),))
    driver.add(make_request(1, prompt, max_tokens=1, hook_payloads=hints.payloads("r")))
    driver.run()
    for id in (2, 3):
        driver.add(make_request(id, 36, max_tokens=1))
        driver.run()
    driver.add(make_request(4, prompt, max_tokens=1))
    driver.run()
    assert driver.cached[-1] == (4, 12) and hook.num_held == 0
    driver.assert_at_rest()


def test_ranges_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="more than start"):
        KVRetention(start=4, end=4, priority=1)
    raw = msgspec.Raw(msgspec.msgpack.encode([{"priority": 101}]))
    with pytest.raises(InvalidRequest, match="kv_retention"):
        unpack_retention(raw)
    driver = Driver(make_spec())
    hints = EngineHints(retention=(KVRetention(priority=80),))
    driver.add(make_request(1, 8, hook_payloads={RETENTION: hints.payloads("")[RETENTION]}))
    driver.step()
    error = driver.finished[1].error
    assert error is not None and error.kind == Unsupported.__name__
    assert "--kv-retention" in error.message


def test_blocks_of_unequal_bytes_are_refused() -> None:
    groups = (
        KVGroup(kind="full", caches=(0,), blocks_per_slab=2),
        KVGroup(kind="window", caches=(1,), span=8),
    )
    with pytest.raises(ConfigError, match=r"--kv-eviction: .*unequal bytes"):
        pool_of(facts_of(*groups), [False, True], CacheChoices(eviction="lfu"))


# ENG-12


@pytest.mark.parametrize("name", list(HASHERS))
def test_every_hash_gives_the_same_hits(name: str) -> None:
    """ENG-12: equal prefixes share, other tenants and salts never; of two processes none is alike."""
    if name.startswith("xxhash") and not available("xxhash"):
        with pytest.raises(ConfigError, match="not installed"):
            check_hash(name)
        return
    check_hash(name)
    one, other = HASHERS[name](b"k" * 32), HASHERS[name](b"l" * 32)
    start = one.start(tenant="a", salt="", extra_keys=())
    assert one.extend(start, b"12345678") == one.extend(start, b"12345678")
    digests = {
        one.extend(start, b"12345678"),
        one.extend(start, b"12345679"),
        one.extend(start, b"12345678mark"),
        one.extend(one.start(tenant="b", salt="", extra_keys=()), b"12345678"),
        one.extend(one.start(tenant="a", salt="s", extra_keys=()), b"12345678"),
        one.extend(one.extend(start, b"12345678"), b"12345678"),
        other.extend(other.start(tenant="a", salt="", extra_keys=()), b"12345678"),
    }
    assert len(digests) == 7
    spec = make_spec(num_blocks=64, block_tokens=4)
    choices = CacheChoices(hashing=name)
    spec = msgspec.structs.replace(spec, kv=msgspec.structs.replace(spec.kv, choices=choices))
    driver = Driver(spec)
    for id in (1, 2):
        driver.add(make_request(id, list(range(3, 24)), max_tokens=1))
        driver.run()
    assert driver.cached == [(1, 0), (2, 20)]


def test_xxhash_reads_what_sha256_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw bytes, or CBOR; under whatever digest the library has."""
    library = SimpleNamespace(xxh3_128_digest=lambda data: hashlib.md5(data).digest())
    monkeypatch.setitem(sys.modules, "xxhash", library)
    monkeypatch.setattr("headrace.core.kv.hashing.available", lambda name: True)
    parent, block = b"p" * 32, b"\x01\0\0\0\0\x01\0\0"
    raw = HASHERS["xxhash"](b"k").extend(parent, block)
    assert raw == hashlib.md5(parent + block).digest()
    whole = b"\x83\x58\x20" + parent + b"\x82\x01\x19\x01\x00\xf6"
    assert HASHERS["xxhash_cbor"](b"k").extend(parent, block) == hashlib.md5(whole).digest()


def test_cbor_is_that_of_the_standard() -> None:
    """The examples of RFC 8949, appendix A."""
    assert cbor([0, 23, 24, 100, 1000, 1000000]).hex() == "860017181818641903e81a000f4240"
    assert cbor([b"\x01\x02\x03\x04", [1, [2, 3]], None]).hex() == "8344010203048201820203f6"
    parent = b"p" * 32
    whole = hashlib.sha256(b"\x83\x58\x20" + parent + b"\x82\x01\x19\x01\x00\xf6").digest()
    assert HASHERS["sha256_cbor"](b"k").extend(parent, b"\x01\0\0\0\0\x01\0\0") == whole


@pytest.mark.parametrize(("every", "ends"), [(1, [8, 7, 4]), (4, [8, 4]), (16, [])])
def test_state_is_kept_at_the_ends_of_so_many_blocks(every: int, ends: list[int]) -> None:
    """ENG-12: the retention interval of recurrent layers' state."""
    group = KVGroup(kind="state", caches=(0,), num_slots=9)
    snapshots = Snapshots([group], 4, every=every)
    places: list[int] = []
    for tokens in (32, 28, 16, 18):
        wire = make_request(tokens, tokens)
        request = Request(wire, arrival=0, now=0.0, groups=1, length_limit=99)
        places += [index + 1 for _, index, _ in snapshots.take(request, tokens)]
    assert places == ends
    cut = {want: snapshots.chunk_tokens(start=0, want=want) for want in (18, 3)}
    assert cut == {18: 16 if every < 16 else 18, 3: 3}, "a chunk ends where state is kept"
