"""What the KV manager asks of a kind of cache: one protocol, one class per kind.

A kind works in blocks of its own group and knows neither pools nor requests. What a request's
growth takes, what may be given back, and what a prefix hit needs are its answers; the manager adds
them up over the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup


class CacheKind(Protocol):
    """The rules of one group of caches; see the classes beside this file.

    trims     blocks may be given back while the request runs
    shares    its blocks can be found again by other requests
    """

    trims: bool
    shares: bool

    def num_blocks(self, tokens: int) -> int:
        """Entries of the block table of a sequence that holds so many tokens."""
        ...

    def first_kept(self, position: int) -> int:
        """The first block still needed when the next token to compute is at `position`."""
        ...

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that a request can begin behind its first h blocks."""
        ...

    def hit_start(self, hit: int) -> int:
        """The first block that a hit of `hit` blocks makes use of; the last is hit - 1."""
        ...

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """The most blocks held at one time beyond those of a hit of `done` tokens, while the rest
        of `tokens` is computed in chunks."""
        ...


def span_of(group: KVGroup) -> int:
    """The group's span in tokens, which its kind needs."""
    if group.span is None or group.span < 1:
        raise ConfigError(
            f"KV group of kind {group.kind!r} has span {group.span}; it needs one of at least 1 token"
        )
    return group.span
