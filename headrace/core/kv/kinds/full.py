"""Full attention: every block of the sequence is needed until the request ends.

Latent caches (multi-head latent attention) and the keys of sparse indexers live exactly as long,
so that they are of this kind too; only their bytes differ, which the core does not see.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.step import KVGroup


class FullKind:
    """The rules of a group whose layers attend to the whole sequence."""

    trims = False
    shares = True

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> FullKind:
        """The rules of this group."""
        return FullKind(block_tokens)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return -(-tokens // self._block_tokens)

    def first_kept(self, position: int) -> int:
        """See CacheKind."""
        return 0

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that blocks 0 .. h-1 are all cached."""
        for index in range(end):
            if not is_cached(index):
                return index
        return end

    def hit_start(self, hit: int) -> int:
        """See CacheKind."""
        return 0

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        return self.num_blocks(tokens) - self.num_blocks(done)
