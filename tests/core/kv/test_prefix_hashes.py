"""P16: what enters the hash of a block."""

from __future__ import annotations

import itertools

from headrace.core.kv.pool import DIGEST_BYTES, PrefixHasher

HASHER = PrefixHasher(b"k" * 32)


def start(tenant: str = "", salt: str = "", extra_keys: tuple[bytes, ...] = ()) -> bytes:
    return HASHER.start(tenant=tenant, salt=salt, extra_keys=extra_keys)


def test_tenant_salt_and_extra_keys_each_separate_and_do_not_run_together() -> None:
    starts = [
        start(),
        start(tenant="ab"),
        start(salt="ab"),
        start(tenant="a", salt="b"),
        start(extra_keys=(b"ab",)),
        start(extra_keys=(b"a", b"b")),
        start(extra_keys=(b"b", b"a")),
        start(extra_keys=(b"", b"")),
        start(extra_keys=(b"",)),
    ]
    assert all(a != b for a, b in itertools.combinations(starts, 2))


def test_a_block_depends_on_all_tokens_before_it() -> None:
    first, other = HASHER.extend(start(), b"1234"), HASHER.extend(start(), b"1235")
    assert first != other
    assert HASHER.extend(first, b"5678") != HASHER.extend(other, b"5678")
    assert first == HASHER.extend(start(), b"1234") and len(first) == DIGEST_BYTES


def test_two_processes_name_the_same_content_differently() -> None:
    one, two = PrefixHasher(), PrefixHasher()
    names = {h.start(tenant="t", salt="", extra_keys=()) for h in (one, two)}
    assert len(names) == 2
