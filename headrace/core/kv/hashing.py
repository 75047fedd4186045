"""Other hash functions for the names of blocks than the default (pool.py): `--prefix-hash`.

All of them begin a chain with the secret of the process, tenant, salt and extra keys under BLAKE2b,
so that no name says anything outside of it. What follows is hashed by the function's own rule:

    sha256       SHA-256 of the name before and the raw token ids
    sha256_cbor  SHA-256 of the CBOR (RFC 8949, deterministic) of [name before, [token ids], null]
    xxhash       XXH3 of 128 bits: faster, but whoever controls prompts may look for collisions
    xxhash_cbor  XXH3 of 128 bits of the same CBOR
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.optional import available
from headrace.core.kv.pool import PrefixHasher


class Sha256Hasher(PrefixHasher):
    """SHA-256 over raw bytes."""

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """See PrefixHasher."""
        return sha256(parent + token_bytes).digest()


class CborHasher(PrefixHasher):
    """SHA-256 over CBOR."""

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """See PrefixHasher."""
        return sha256(_item(parent, token_bytes)).digest()


class XXHasher(PrefixHasher):
    """XXH3, 128 bits, over raw bytes."""

    def __init__(self, key: bytes | None = None) -> None:
        super().__init__(key)
        check_hash("xxhash")
        library: Any = import_module("xxhash")
        self._digest: Callable[[bytes], bytes] = library.xxh3_128_digest

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """See PrefixHasher."""
        return self._digest(parent + token_bytes)


class XXCborHasher(XXHasher):
    """The same over CBOR."""

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """See PrefixHasher."""
        return self._digest(_item(parent, token_bytes))


def _item(parent: bytes, token_bytes: bytes) -> bytes:
    """What is hashed of a block as CBOR. What stands behind whole token ids (marks of media) is the
    third item."""
    whole = len(token_bytes) - len(token_bytes) % 4
    ids = np.frombuffer(token_bytes[:whole], "<u4").tolist()
    return cbor([parent, ids, token_bytes[whole:] or None])


def cbor(value: object) -> bytes:
    """Deterministic CBOR of None, natural numbers, bytes and lists of such."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    assert isinstance(value, list), value
    return _head(4, len(value)) + b"".join(map(cbor, value))


def _head(kind: int, number: int) -> bytes:
    """The first bytes of an item: its kind, and a number in the shortest form."""
    if number < 24:
        return bytes([kind << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << (8 * size):
            return bytes([kind << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(number)


HASHERS: dict[str, type[PrefixHasher]] = {
    "blake2b": PrefixHasher,
    "sha256": Sha256Hasher,
    "sha256_cbor": CborHasher,
    "xxhash": XXHasher,
    "xxhash_cbor": XXCborHasher,
}


def check_hash(name: str) -> None:
    """ConfigError where the library of a hash function is not installed."""
    if name.startswith("xxhash") and not available("xxhash"):
        raise ConfigError(
            f"--prefix-hash {name}: the library is not installed (pip install xxhash)",
            field="prefix_hash",
        )
