"""Names for the content of KV blocks: a keyed cryptographic hash chain over everything the content depends on.

    start   = H(tenant, cache salt, extra keys)          each with its length in front: no two lists look alike
    block i = H(block i-1, token ids of block i)         the raw little-endian bytes

H is BLAKE2b keyed with a secret of this process (P16): nobody can construct two prompts that collide, nor learn
anything from a hash, and a hash of another process or tenant means nothing here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 16


class PrefixHasher:
    """Makes the hashes of one engine core."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def start(self, *, tenant: str, salt: str, extra_keys: Iterable[bytes]) -> bytes:
        """The chain's start: prompts share blocks only if they agree in all of this."""
        parts = [tenant.encode(), salt.encode(), *extra_keys]
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake2b(framed, digest_size=DIGEST_BYTES, key=self._key).digest()

    def extend(self, parent: bytes, token_bytes: bytes) -> bytes:
        """The hash of the block with these tokens behind `parent`."""
        return blake2b(parent + token_bytes, digest_size=DIGEST_BYTES, key=self._key).digest()
